"""The library stays small in its parts, and the walk of one step in docs/architecture.md names what a step runs."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from dpshard import PrivacyEngine

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "dpshard"
FILES = sorted(LIBRARY.rglob("*.py"))
ASIDE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    tree = ast.parse(file.read_text("utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def lines_of_code(source: str) -> int:
    """Lines with code: no blanks, comments or strings that are statements of their own."""
    lines: set[int] = set()
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        prose = token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type not in ASIDE and not prose:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            previous = token.type
    return len(lines)


def test_lines_of_code_are_counted_without_prose() -> None:
    assert lines_of_code('"""Prose,\nmore of it."""\n\nx = (\n    "text"\n)  # why\n"""About x."""\n') == 3


def test_no_function_is_longer_than_60_lines() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in FILES
        for node in functions(file)
        if (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not long


def test_no_file_is_longer_than_330_lines_of_code() -> None:
    assert not [f"{file.relative_to(ROOT)}" for file in FILES if lines_of_code(file.read_text("utf-8")) > 330]


def test_the_house_has_at_most_ten_loose_modules() -> None:
    loose = [file.name for file in LIBRARY.glob("*.py") if not file.name.startswith("__")]
    assert len(loose) <= 10, loose


ROOMS = sorted(file for file in LIBRARY.glob("*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda file: file.parent.name)
def test_a_room_says_where_to_begin_and_what_it_may_import(room: Path) -> None:
    told = ast.get_docstring(ast.parse(room.read_text("utf-8"))) or ""
    assert re.search(r"[Bb]egin with", told)
    assert re.search(r"\bmay\s+import\b", told, re.IGNORECASE)


def misnamed(function: ast.FunctionDef) -> bool:
    """require_x raises unless x, refuse_x raises if x, and the docstring says so; `check` says neither."""
    verb = re.match(r"_*(require|refuse|check|checked)(_|$)", function.name)
    if verb is None:
        return False
    told = (ast.get_docstring(function) or "").partition("\n\n")[0]
    says_unless = re.search(r"\bunless\b", told) is not None
    return verb[1].startswith("check") or (bool(told) and says_unless != (verb[1] == "require"))


def test_require_raises_unless_and_refuse_raises_if() -> None:
    assert not [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in FILES
        for node in functions(file)
        if misnamed(node)
    ]


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('def require_x(): "Raise E unless x."', False),
        ('def refuse_x(): "Raise E if x."', False),
        ("def _require_x(): pass", False),
        ('def require_x(): "Raise E if x."', True),
        ('def _refuse_x(): "Raise E unless x."', True),
        ("def _check(): pass", True),
        ("def checkpoint(): pass", False),
    ],
)
def test_a_wrong_verb_is_noticed(source: str, wrong: bool) -> None:
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert misnamed(function) == wrong


def walk() -> list[tuple[str, str]]:
    """(file or folder, function or "") of each place that the walk of one step names."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    section = page.partition("\n## One step, as data\n")[2].partition("\n## ")[0]
    return re.findall(r"`([\w/]+(?:\.py|/))`(?:: `(\w+)`)?", section)


def called_in_one_step() -> set[tuple[str, str]]:
    """(file, name) of every function of the library that a training step calls, and of their classes."""
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(LIBRARY):
            inside = file.relative_to(LIBRARY).as_posix()
            found.update((inside, part) for part in frame.f_code.co_qualname.split("."))

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    engine = PrivacyEngine(model, batch_size=4, sample_size=8, steps=1, noise_multiplier=1.0, verify=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for logical_batch in engine.batches(torch.utils.data.TensorDataset(torch.ones(8, 3)), 4):
            for (x,) in logical_batch:
                model(x).sum(1).mean().backward()
            optimizer.step()
    finally:
        sys.setprofile(before)
        engine.detach()
    return found


def test_the_walk_of_one_step_names_what_a_step_runs() -> None:
    places, called = walk(), called_in_one_step()
    assert len(places) > 15
    assert not [place for place, _ in places if not (LIBRARY / place).exists()]
    assert not [(place, name) for place, name in places if name and (place, name) not in called]
