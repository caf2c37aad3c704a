"""Parts of a self-contained HTML page, without external links, scripts or fonts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root { --ink: #1c2530; --soft: #5b6774; --line: #dfe4ea; --accent: #2a5caa; --pale: #f4f7fb; --alarm: #a32638; }
* { box-sizing: border-box; }
html { background: #eceff3; }
body { margin: 2rem auto; max-width: 60rem; padding: 3.2rem 4rem 2.4rem; background: #fff; color: var(--ink);
  font: 16px/1.55 "Source Sans 3", "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
  box-shadow: 0 1px 3px #0002, 0 10px 40px #0001; border-radius: 6px; }
header { border-bottom: 3px solid var(--accent); padding-bottom: 1.1rem; margin-bottom: 1.6rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
header p { margin: 0.35rem 0 0; color: var(--soft); }
h2 { font-size: 1.2rem; margin: 2.6rem 0 0.8rem; padding-bottom: 0.25rem; border-bottom: 1px solid var(--line); }
.badge { float: right; margin-top: 0.2rem; font-size: 0.72rem; font-weight: 600; color: var(--alarm);
  border: 1px solid currentColor; border-radius: 1rem; padding: 0.08rem 0.7rem; }
p { margin: 0.7rem 0; max-width: 46rem; }
sup { line-height: 0; }
.note, .warning { border-left: 4px solid var(--accent); background: var(--pale); padding: 0.6rem 1rem; }
.note { font-size: 0.92rem; max-width: none; }
.warning { border-color: var(--alarm); background: #fdf1f2; color: var(--alarm); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1rem; margin: 1rem 0; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: 0.9rem 1.1rem; }
.card b { display: block; color: var(--soft); font-size: 0.85rem; font-weight: 600; }
.card strong { display: block; font-size: 1.65rem; line-height: 1.25; font-weight: 650; color: var(--accent);
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.card span { color: var(--soft); font-size: 0.85rem; }
.card.words strong { font-size: 1.2rem; padding: 0.28rem 0; }
blockquote { margin: 1.1rem 0; padding: 0.8rem 1.2rem; background: var(--pale); border-radius: 6px; font-weight: 500; }
table { border-collapse: collapse; font-size: 0.93rem; margin: 0.8rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.36rem 1.8rem 0.36rem 0; }
tr > * { border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
table:not(.facts) td:not(:last-child) { white-space: nowrap; }
table.facts { width: 100%; }
table.facts th { width: 9rem; }
tr:last-child > * { border-bottom: 0; }
ul { padding-left: 1.2rem; margin: 0.5rem 0; max-width: 46rem; }
li { margin: 0.35rem 0; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem 1.6rem; margin-top: 1rem; }
figure { margin: 0.6rem 0; break-inside: avoid; }
figure.beside { display: grid; grid-template-columns: 3fr 2fr; gap: 0 2rem; align-items: center; }
figure.beside figcaption { grid-column: 1; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 0.86rem; margin-top: 0.2rem; }
pre { background: var(--pale); border-radius: 6px; padding: 0.8rem 1rem; font-size: 0.82rem; line-height: 1.5;
  white-space: pre-wrap; overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { background: var(--pale); padding: 0.05em 0.35em; border-radius: 3px; font-size: 0.88em; }
details pre { columns: 2 15rem; }
summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 2.6rem; padding-top: 0.8rem; border-top: 1px solid var(--line); }
footer { color: var(--soft); font-size: 0.85rem; }
@media (max-width: 44rem) {
  body { margin: 0; padding: 1.4rem; border-radius: 0; }
  .cards, .grid, figure.beside { grid-template-columns: 1fr; }
  .many, .many tbody, .many tr, .many td { display: block; }
  .many thead { display: none; }
  .many tr { border-bottom: 1px solid var(--line); padding: 0.5rem 0; }
  .many tr:last-child, .many tr > * { border-bottom: 0; }
  .many td { padding: 0.15rem 0 0.15rem 6.5rem; text-indent: -6.5rem; }
  .many td::before { content: attr(data-name); display: inline-block; width: 6.5rem; text-indent: 0;
    color: var(--soft); font-weight: 600; }
}
@page { size: A4; margin: 16mm 15mm; }
@media print {
  html { background: #fff; }
  body { margin: 0; padding: 0; max-width: none; box-shadow: none; font-size: 10.5pt; }
  h2 { break-after: avoid; margin-top: 1.6rem; }
  .cards, table, blockquote, .note, .warning { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def document(title: str, *, subtitle: str, note: str, sections: Sequence[str]) -> str:
    """Return the whole page. `title`, `subtitle` and `note` are text, sections are HTML."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>\n"
        f'<p class="note">{escape(note)}</p>\n' + "\n".join(sections) + "\n<footer>Written by dpshard report. "
        "Epsilon has a meaning only together with delta, the neighbours and the unit.</footer>\n</body>\n</html>\n"
    )


def section(title: str, content: str, *, badge: str = "") -> str:
    """Return a section; `content` is HTML, `badge` a short label beside its title."""
    mark = f'<span class="badge">{escape(badge)}</span>' if badge else ""
    return f"<section>\n<h2>{mark}{escape(title)}</h2>\n{content}\n</section>"


def warning(text: str) -> str:
    """Return a warning that stands out; `text` is text."""
    return f'<p class="warning">{escape(text)}</p>'


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Return cards of figures: name, value and explanation, all text."""

    def card(name: str, value: str, text: str) -> str:
        kind = "card" if value[:1].isdigit() else "card words"
        lines = f"<b>{escape(name)}</b><strong>{escape(value)}</strong><span>{escape(text)}</span>"
        return f'<div class="{kind}">{lines}</div>'

    return f'<div class="cards">{"".join(card(*item) for item in items)}</div>'


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and values, both HTML."""
    lines = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in rows)
    return f'<table class="facts"><tbody>{lines}</tbody></table>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text.

    On narrow pages a table with many columns becomes a list of its rows.
    """

    def line(row: Sequence[str]) -> str:
        return "".join(
            f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(head, row, strict=True)
        )

    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(f"<tr>{line(row)}</tr>" for row in rows)
    kind = ' class="many"' if len(head) > 4 else ""
    return f"<table{kind}><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def bullets(items: Sequence[str]) -> str:
    """Return a list of text."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def figure(svg: str, caption: str, beside: str = "") -> str:
    """Return a picture (SVG) over its caption (text), with the HTML `beside` it."""
    image = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    kind = ' class="beside"' if beside else ""
    return f"<figure{kind}>{image}{beside}<figcaption>{escape(caption)}</figcaption></figure>"
