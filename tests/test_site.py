"""The site of `make docs`: complete, without a warning, and with nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpshard

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


@pytest.mark.exhaustive
def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    loads = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="?(?:https?:)?//[^" >]+')
    for page in pages:
        text = page.read_text("utf-8")
        assert not loads.findall(text), page
        assert 'class="mermaid"' not in text  # for which the theme would ask another server
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", style.read_text("utf-8")), style


def test_search_finds_pages_and_api(site: Path) -> None:
    entries = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    found = {entry["location"]: entry["text"] for entry in entries}
    assert "api/engine/#dpshard.PrivacyEngine" in found
    assert "Poisson" in found["guide/#the-loop"]
    assert "start/table/" in found
    assert "known-failures/" in found


def test_the_api_has_what_the_package_exports(site: Path) -> None:
    text = "".join(page.read_text("utf-8") for page in (site / "api").rglob("index.html"))
    missing = [name for name in dpshard.__all__ if not re.search(rf'id="dpshard\.(?:[\w.]+\.)?{name}"', text)]
    assert missing == ["__version__"]


def test_figures_of_the_benchmark_come_along(site: Path) -> None:
    text = (site / "benchmarks/index.html").read_text("utf-8")
    figures = re.findall(r'<img[^>]*src="([^"]+)"', text)
    assert figures
    assert all((site / "benchmarks" / figure).exists() for figure in figures)
