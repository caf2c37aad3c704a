"""Changes of the site to pages of docs/: figures of the benchmark come along, other links out of it are plain words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the figures of the benchmark."""
    for figure in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"images/results/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text with links out of docs/ as plain words."""
    folder = Path(page.file.abs_src_path).parent

    def named(link: re.Match[str]) -> str:
        target = link.group(2).partition("#")[0]
        outside = target.startswith("..") and not (folder / target).resolve().is_relative_to(ROOT / "docs")
        return link.group(1) if outside else link.group(0)

    markdown = re.sub(rf"\]\(\.\./{RESULTS}/([\w-]+\.png)\)", r"](images/results/\1)", markdown)
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", named, markdown)
