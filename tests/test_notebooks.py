"""The notebooks of docs/notebooks run, at a tiny size; no outputs are kept in them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "docs/notebooks"
TINY = {
    "first-model": {"EPOCHS = 20": "EPOCHS = 1"},
    "epsilon-and-noise": {},
    "audit": {"STEPS, TRIALS, CANARIES = 40, 200, 200": "STEPS, TRIALS, CANARIES = 2, 40, 10"},
}
"""What is made smaller, by notebook."""
PRINTS = {"first-model": "epsilon = 3.0", "epsilon-and-noise": "right guesses", "audit": "<= epsilon <="}
LARGEST = 60_000


def read(name: str) -> Any:
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def test_these_are_all() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == TINY.keys()


@pytest.mark.parametrize("name", TINY)
def test_no_outputs_are_kept(name: str) -> None:
    for cell in read(name).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < LARGEST


@pytest.mark.parametrize("name", TINY)
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets of the kernel's client
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOKS.parents[1]), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(name)
    for before, after in TINY[name].items():
        found = [cell for cell in notebook.cells if before in cell.source]
        assert len(found) == 1
        found[0].source = found[0].source.replace(before, after)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    assert re.search(PRINTS[name], printed), printed
