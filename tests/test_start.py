"""Ten minutes from zero: every block of the five pages runs, in the order of the page, as a reader would run it."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dpshard.applications.cli import app
from tests.applications.cli.conftest import no_pictures
from tests.distributed.launch import prints
from tests.grids import chosen

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/start").glob("*.md"))
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_there_are_five() -> None:
    assert {page.stem for page in PAGES} == {"table", "images", "language", "own-loop", "several-gpus"}


@pytest.mark.parametrize(
    "page",
    chosen(PAGES, *(page for page in PAGES if page.stem in ("images", "own-loop"))),
    ids=lambda page: page.stem,
)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    if page.stem == "images":
        from tests.zoo.beside import import_timm

        import_timm()
    if page.stem == "language":
        pytest.importorskip("peft")
        pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for kind, source in BLOCK.findall(page.read_text("utf-8")):
        if kind == "sh":
            for line in source.replace("\\\n", " ").splitlines():
                run_in_the_shell(shlex.split(line, comments=True))
        elif script := re.match(r"# (\w+\.py)\n", source):
            (tmp_path / script.group(1)).write_text(source)
        else:
            run_as_the_reader(page, source, namespace, capsys)


def run_as_the_reader(page: Path, source: str, namespace: dict[str, Any], capsys: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(textwrap.dedent(source), page.name, "exec"), namespace)
    printed = capsys.readouterr().out
    promised = re.findall(r"^print\(.*\)\n# (.+)$", source, re.MULTILINE)
    assert printed.splitlines()[-len(promised) :] == promised or not promised
    if re.search(r"^print\(", source, re.MULTILINE):
        assert "epsilon = " in printed


def run_in_the_shell(arguments: list[str]) -> None:
    program, *rest = arguments
    if program == "pip":
        assert rest[0] == "install"
        known = (ROOT / "pyproject.toml").read_text("utf-8")
        assert all(f"\n{name} = [" in known for name in re.findall(r"\[(\w+)\]", " ".join(rest)))
    elif program == "torchrun":
        assert rest[0] == "--nproc_per_node=2"
        assert "epsilon = 2.0" in prints([sys.executable, *map(str, [ROOT / "tests/as_script.py", *rest[1:]])], 2)[0]
    else:
        assert program == "dpshard"
        if "--nproc" in rest:  # ranks are started, and forked from a warm process, by tests of their own
            rest = [word for word in rest if word not in ("--shard", "fsdp2", "--nproc", "2")]
        with no_pictures():
            result = CliRunner().invoke(app, rest)
        assert result.exit_code == 0, result.output
