"""One HTML page that needs nothing beside itself: no script, no network, legible on light and on dark."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from hfq.benchmarks.report import Table
from hfq.plots.drawing import draw_svg
from hfq.plots.section import Picture, Section
from hfq.version import __version__

__all__ = ["make_page"]

_MOST_OPEN_ROWS = 24
_MOST_COLUMNS_BESIDE = 5
_MOST_POINTS_BESIDE = 640.0
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2329; --paper: #ffffff; --faint: #5b636e; --rule: #d0d5db; --band: #f4f6f8;
  --link: #0057a3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --paper: #15181c; --faint: #a7afb9; --rule: #3b424b; --band: #1e2329; --link: #7cbcf5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 88rem; padding: 1.5rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
a { color: var(--link); }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.35rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 2px solid var(--rule); overflow-wrap: anywhere; }
h3 { font-size: 1.05rem; margin: 1.25rem 0 .5rem; }
header p, .note p { margin: .25rem 0; }
header p, .note { color: var(--faint); margin: .25rem 0 .75rem; }
figcaption { font-size: 1.05rem; font-weight: bold; margin: 1.25rem 0 .5rem; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .15rem 1rem; margin: 0 0 1rem; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; }
.shown { display: grid; grid-template-columns: minmax(0, 1fr); gap: .5rem 2rem; align-items: start; }
figure { margin: 0; }
figure svg { display: block; max-width: 100%; height: auto; color: var(--ink); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { background: var(--band); }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
.tables { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: start; }
.tables > div { max-width: 100%; }
.tables .note { max-width: 40rem; }
summary { cursor: pointer; color: var(--link); margin: .5rem 0; }
@media (min-width: 75rem) { .shown.beside { grid-template-columns: minmax(0, 5fr) minmax(0, 4fr); } }
@media print { details > * { display: block; } }
"""

_NUMBER = re.compile(r"^(-|[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( ?(%|s|ms|B|[kMGT]B|GB/s|tokens/s))?)$")


def make_page(sections: Sequence[Section], draw: Callable[[Picture, str], str] = draw_svg) -> str:
    """The page of all sections.

    Args:
        sections: What stands on it.
        draw: Makes an `<svg>` element of a picture; its second argument comes before every id.

    Raises:
        SetupError: matplotlib is not installed.
    """
    titles = [f'<li><a href="#file-{place}">{escape(section.title)}</a></li>' for place, section in enumerate(sections, 1)]
    body = "\n".join(_section(section, f"file-{place}", draw) for place, section in enumerate(sections, 1))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>hfq report</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>hfq report</h1>
<p>Drawn by hfq {escape(__version__)} from the numbers of the files; nothing was measured for it.</p>
<nav aria-label="Contents"><ul>
{chr(10).join(titles)}
</ul></nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _section(section: Section, name: str, draw: Callable[[Picture, str], str]) -> str:
    facts = "\n".join(f"<dt>{escape(what)}</dt><dd>{escape(fact)}</dd>" for what, fact in section.facts.items())
    shown = "\n".join(_picture(picture, f"{name}-{picture.name}", draw) for picture in section.pictures)
    tables = "\n".join(f"<div>{_table(table)}</div>" for table in section.tables)
    return f"""<section id="{name}" aria-labelledby="{name}-title">
<h2 id="{name}-title">{escape(section.title)}</h2>
<dl>
{facts}
</dl>
{shown}
<div class="tables">
{tables}
</div>
</section>"""


def _picture(picture: Picture, name: str, draw: Callable[[Picture, str], str]) -> str:
    alt = f'<svg role="img" aria-label="{escape(picture.alt, quote=True)}"'
    svg = draw(picture, name).replace("<svg", alt, 1)
    table = "" if picture.table is None else f"<div>{_table(picture.table)}</div>"
    width = re.search(r'\bwidth="([\d.]+)pt"', svg)
    is_wide = width is not None and float(width[1]) > _MOST_POINTS_BESIDE
    beside = "" if is_wide or picture.table is None or len(picture.table.header) > _MOST_COLUMNS_BESIDE else " beside"
    return f"""<div class="shown{beside}">
<figure>
<figcaption>{escape(picture.title)}</figcaption>
{svg}
</figure>
{table}
</div>"""


def _table(table: Table) -> str:
    """A table; a long one can be opened."""
    numeric = [
        bool(table.rows) and all(_NUMBER.match(row[column]) for row in table.rows) for column in range(len(table.header))
    ]
    kinds = [' class="number"' if is_numeric else "" for is_numeric in numeric]
    head = "".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for cell, kind in zip(table.header, kinds, strict=True))
    rows = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in table.rows
    )
    grid = f"""<div class="wide"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div>"""
    if len(table.rows) > _MOST_OPEN_ROWS:
        grid = f"<details><summary>{len(table.rows)} rows</summary>\n{grid}\n</details>"
    return f'<h3>{escape(table.title)}</h3>\n<div class="note">{_note(table.note)}</div>\n{grid}'


def _note(text: str) -> str:
    """Paragraphs and lists of a note, whose lines may begin with a dash."""
    parts = []
    for block in text.strip().split("\n\n"):
        lead, *items = re.split(r"^- ", escape(block), flags=re.MULTILINE)
        parts += [f"<p>{lead.strip()}</p>"] if lead.strip() else []
        parts += ["<ul>", *(f"<li>{item.strip()}</li>" for item in items), "</ul>"] if items else []
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", "".join(parts))
