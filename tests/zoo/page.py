"""docs/models.md: what the tests of the zoo compare with the oracle. Written by `python -m tests.zoo.page`.

A row is what one test saw. The tests compare theirs with the page whenever they run, so the page stays current.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.beside import BESIDE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/models.md"
LIBRARIES = ("torch", "transformers", "peft", "timm")
SECTIONS = {
    "test_language_models.py": "Language models of transformers",
    "test_vision_and_sound.py": "Vision and sound, transformers",
    "test_timm.py": "Vision, timm",
    "test_peft.py": "Adapters of peft, and parts of models",
    "test_diffusion_and_recommenders.py": "Diffusion and recommenders",
    "test_spectral.py": "Spectral models",
}
"""Test files on the page; the modules of torch are in the guide's table of rules."""

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""Tests of the zoo in pytest's configuration, with deselected ones."""

HEAD = """# Models

Every row is a small random model. A test trains it for one step without noise in all-layer and in layer-wise style. It
compares the step with plain autograd, one sample at a time, in float64. The error is that of the worst parameter,
relative to the gradient. *Functions* are those in which parameters meet samples. Nothing was changed in the models.

`python -m tests.zoo.page` has written this page, with {versions}.
"""


@dataclass
class Row:
    """What one test saw."""

    model: str = ""
    parameters: int = 0
    functions: set[str] = field(default_factory=set)
    error: float = 0.0


seen = Row()
"""What the running test has seen."""


def note(model: Any, functions: set[str], error: float) -> None:
    """Add the findings of a comparison to the running test's row."""
    seen.model = seen.model or type(model).__name__
    seen.parameters = seen.parameters or sum(p.numel() for p in model.parameters() if p.requires_grad)
    seen.functions |= functions
    seen.error = max(seen.error, error)


def begin() -> None:
    """Start a test's row."""
    seen.__init__()


def versions() -> list[str]:
    """Return the installed libraries of the models: `torch 2.13.0`."""
    path = [*sys.path, str(BESIDE)]
    found = {name: list(metadata.distributions(name=name, path=path)) for name in LIBRARIES}
    return [f"{name} {d[0].version.partition('+')[0]}" for name, d in found.items() if d]


def is_comparable() -> bool:
    """Return True if the page was written with the installed libraries."""
    head = PAGE.read_text("utf-8").partition("\n## ")[0]
    return all(version in head for version in versions())


def name_of(item: pytest.Item) -> str:
    """Return the name of a row: `decoders[GPT2]`."""
    return item.name.removeprefix("test_")


def rows() -> dict[tuple[str, str], list[str]]:
    """Return the page's cells (model, parameters, functions, error), by section and name."""
    found, section = {}, ""
    for line in PAGE.read_text("utf-8").splitlines():
        section = line[3:] if line.startswith("## ") else section
        cells = re.findall(r"(?<=\|)[^|]+(?=\|)", line)
        if section and len(cells) == 5 and cells[0].strip().startswith("`"):
            name, *rest = (cell.strip() for cell in cells)
            found[section, name.strip("`")] = rest
    return found


def cells() -> list[str]:
    """Return the running test's row."""
    functions = ", ".join(f"`{name}`" for name in sorted(seen.functions))
    return [f"`{seen.model}`", f"{seen.parameters:,}", functions, f"{seen.error:.0e}"]


class Writer:
    """Collects the rows of all tests of a run."""

    def __init__(self) -> None:
        self.sections: dict[str, list[tuple[int, str, list[str]]]] = {title: [] for title in SECTIONS.values()}

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if item.path.name in SECTIONS and seen.model:
            place = item.config.stash[COLLECTED].index(item)
            self.sections[SECTIONS[item.path.name]].append((place, name_of(item), cells()))

    def text(self) -> str:
        parts = [HEAD.format(versions=", ".join(versions()))]
        for title, found in self.sections.items():
            parts += [
                f"\n## {title}\n",
                "| test | model | trained parameters | functions | error |",
                "|---|---|---:|---|---:|",
            ]
            parts += [
                " | ".join(("|", f"`{name}`", *row, "|")).strip().replace("| |", "|") for _, name, row in sorted(found)
            ]
        return "\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


def write() -> int:
    """Run the zoo and write the page; return pytest's exit status."""
    writer = Writer()
    files = [str(Path(__file__).parent / name) for name in SECTIONS]
    status = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *files], plugins=[writer])
    if status == 0:
        PAGE.write_text(writer.text(), "utf-8")
    return int(status)


if __name__ == "__main__":
    from tests.zoo import page  # the module in which tests take notes, not its copy __main__

    sys.exit(page.write())
