"""Pages, docstrings and errors keep to short sentences, without the phrases that CONTRIBUTING.md rules out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.prose import FILES, GOAL, LIMIT, PAGES, ROOT, docstrings, of_docstrings, of_errors, sentences, words

ABOVE_GOAL = 11
"""Sentences of docstrings above the goal; lower it when they are fewer."""

BANNED = re.compile(
    r"""\b(?:
        but\ for | shall | whoever | nobody\ can | goes?\ on\ (?:with|by|from) | is\ none | are\ none | held\ to
        | of\ which | is\ told | looks?\ away | from\ there\ on
        | (?:engine|dpshard|ledger|planner|tape|code|function|rank)\ knows
    )\b | ,\ for\ (?:it|they|these|this|there)\ """,
    re.VERBOSE,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_are_short_and_plain(page: Path) -> None:
    found = list(sentences(page.read_text("utf-8")))
    assert not [(line, words(sentence), sentence) for line, sentence in found if words(sentence) > LIMIT]
    assert not [(line, sentence) for line, sentence in found if BANNED.search(sentence)]


def test_long_and_banned_sentences_are_seen() -> None:
    """Code, tables, quotations and generated parts are not, whatever they hold."""
    long = "word " * LIMIT + "end."
    page = f"# Title\n\nShort. {long}\n- {long} It goes on by `x y`.\n| {long} |\n```\n{long}\n```\n"
    page += f'<!-- made -->\n{long}\n<!-- /made -->\nHe said "{long}" and [left](home.md).\n'
    counts = [(line, words(sentence)) for line, sentence in sentences(page)]
    assert counts == [(3, 1), (3, LIMIT + 1), (4, LIMIT + 1), (4, 5), (12, 4)]
    assert [line for line, sentence in sentences(page) if BANNED.search(sentence)] == [4]


def test_sentences_of_docstrings_are_short_and_plain() -> None:
    found = [(file, line, words(text), text) for file in FILES for line, text in of_docstrings(file)]
    assert len(found) > 2500
    assert not [(f"{file.relative_to(ROOT)}:{line}", text) for file, line, count, text in found if count > LIMIT]
    assert sum(count > GOAL for _, _, count, _ in found) <= ABOVE_GOAL
    assert not [(f"{file.relative_to(ROOT)}:{line}", text) for file, line, _, text in found if BANNED.search(text)]


def test_sentences_of_errors_are_short_and_plain() -> None:
    found = [(f"{file.relative_to(ROOT)}:{line}", text) for file in FILES for line, text in of_errors(file)]
    assert len(found) > 1200
    assert not [(place, text) for place, text in found if words(text) > LIMIT or BANNED.search(text)]


def test_errors_are_found(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text('raise DataError(f"{name!r} is bad. " f"Mend {place[0]}: a, b.") from error\n')
    assert [text for _, text in of_errors(tmp_path / "x.py")] == ["x is bad.", "Mend x: a, b."]


def test_docstrings_are_found_without_tables_and_headings() -> None:
    source = '"""First.\n\n[Note: A heading]\nSee [Note: A heading].\na    b c d\n"""\nx = 1\n"""Of x."""\n'
    assert [(line, text.split()) for line, text in docstrings(source)] == [
        (1, ["First.", "See", "note."]),
        (8, ["Of", "x."]),
    ]


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 110
