"""Sentences of the documents, without code, tables, quotations and generated parts; of docstrings and of errors.

`python -m tests.prose` counts the words of every page, and lists the sentences that are too long. With a file of the
library, or a part of its path, it lists those of its docstrings.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/sources.md"})
"""Without the list of papers."""
FILES = sorted((ROOT / "dpshard").rglob("*.py"))
GOAL = 20
"""Words that a sentence should have at most."""
LIMIT = 25
"""Words that tests/test_prose.py allows."""

_HEADING = re.compile(r"^\[Note: [^\]]+\]$", re.MULTILINE)
_REFERENCE = re.compile(r"\[Note:\s[^\]]+\]")
_ROW = re.compile(r"^.*\S {3,}\S.*$", re.MULTILINE)

_CODE = re.compile(r"^([ ]*)(```|~~~).*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->|<!--.*?-->", re.DOTALL)
_LEAD = re.compile(r"^\s*(?:[-*+] |\d+\. |#+ |\||>|!!! |:::|!\[)")
_SPAN = re.compile(r"(`+).+?\1")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_QUOTATION = re.compile(r'"[^"]*"')
_ABBREVIATION = r"(?<!e\.g\.)(?<!i\.e\.)(?<! al\.)(?<!vs\.)(?<!Eq\.)(?<!Sec\.)(?<!Fig\.)"
_END = re.compile(rf"(?:(?<=[.!?]){_ABBREVIATION}|(?<=…)(?=\s+[A-Z]))[)*\"]*\s+")


def blocks(markdown: str) -> Iterator[tuple[int, str]]:
    """Line and text of every paragraph and list item."""
    lines = _GENERATED.sub(_blank, _CODE.sub(_blank, markdown)).splitlines()
    start, held = 0, ""
    for number, line in enumerate([*lines, ""], 1):
        if held and (not line.strip() or _LEAD.match(line)):
            yield start, held
            held = ""
        text = re.sub(r"^\s*(?:[-*+] |\d+\. )", "", line)
        if text.strip() and not _LEAD.match(text):
            start, held = (start if held else number), f"{held} {text.strip()}".strip()


def _blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def sentences(markdown: str) -> Iterator[tuple[int, str]]:
    """Line of the paragraph and text of every sentence; code in it counts as one word, a quotation as none."""
    for line, text in blocks(markdown):
        plain = _QUOTATION.sub("", _LINK.sub(r"\1", _SPAN.sub("`code`", text)))
        yield from ((line, sentence) for sentence in _END.split(plain) if re.search(r"\w", sentence))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of every docstring, of attributes too, without tables and headings of notes."""
    nodes = ast.walk(ast.parse(source))
    bodies = [body for node in nodes if isinstance(body := getattr(node, "body", None), list)]
    for statement in (statement for body in bodies for statement in body):
        match statement:
            case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                plain = _ROW.sub("", _HEADING.sub("", inspect.cleandoc(text)))
                yield line, _REFERENCE.sub("note", plain)
            case _:
                pass


def of_docstrings(file: Path) -> list[tuple[int, str]]:
    """Line of the paragraph and text of every sentence in the docstrings of a file."""
    found = docstrings(file.read_text("utf-8"))
    return [(first + line - 1, sentence) for first, text in found for line, sentence in sentences(text)]


def of_errors(file: Path) -> list[tuple[int, str]]:
    """Line and text of every sentence in the errors and warnings of a file; a value in it counts as one word."""
    calls = (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call))
    told = [call for call in calls if re.search(r"Error$|^warnings\.warn$|\.refuse$", ast.unparse(call.func))]
    texts = [(call.lineno, _text(argument)) for call in told for argument in call.args]
    return [(line, sentence) for line, text in texts for _, sentence in sentences(text.replace("\n", " "))]


def _text(node: ast.expr) -> str:
    """Return the text of a string, with "x" for each value in it."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)


def words(sentence: str) -> int:
    """Number of words: what has a letter or a digit between two spaces."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def main() -> None:
    """Print, for each page or chosen file, its words, its sentences, and those of more than `GOAL` words."""
    total, part = 0, " ".join(sys.argv[1:])
    for page in [file for file in FILES if part in file.as_posix()] if part else PAGES:
        found = of_docstrings(page) if part else list(sentences(page.read_text("utf-8")))
        long = [(line, sentence) for line, sentence in found if words(sentence) > GOAL]
        total += (count := sum(words(sentence) for _, sentence in found))
        print(f"{page.relative_to(ROOT)}: {count} words, {len(found)} sentences, {len(long)} too long")
        for line, sentence in long:
            print(f"  {line}: [{words(sentence)}] {sentence}")
    print(f"{total} words")


if __name__ == "__main__":
    main()
