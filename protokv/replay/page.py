"""The HTML page of a report: text, figures and tables, with one stylesheet. It loads nothing from elsewhere.

It is made to be read at 500 pixels, at 1280, in the dark and on paper. No meaning is in a colour alone: a cell that
stands on little data is grey and ends in `*`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FEW: Final = "*"
"""A cell that ends so stands on little data."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Attributes:
        title: above it.
        head: a name for each column.
        rows: cells; the first of each row is its name.
        note: below it, how to read it.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #1a1a1a; --grey: #666; --line: #ccc; --paper: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --grey: #a0a0a0; --line: #444; --paper: #16181c } }
@media print { :root { color-scheme: light; --ink: #000; --grey: #555; --line: #bbb; --paper: #fff } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px; padding: 0 1rem;
  color: var(--ink); background: var(--paper) }
h2 { font-size: 1.15em; margin: 2rem 0 .4rem }
.lead { font-size: 1.2em; max-width: 46rem }
p, li { max-width: 46rem; margin: .3rem 0 }
.note { color: var(--grey); font-size: .9em }
.figures {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); gap: 1.2rem 1rem;
  margin-top: 1.2rem
}
figure { margin: 0 }
svg { width: 100%; max-width: 520px; height: auto; display: block }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line) }
th:first-child { position: sticky; left: 0; background: var(--paper) }
th:first-child { text-align: left }
th.long { overflow-wrap: anywhere; min-width: 9rem }
td span, th.short { white-space: nowrap }
td.few { color: var(--grey); font-style: italic }
dl { display: grid; grid-template-columns: fit-content(12rem) 1fr; gap: .1rem 1rem }
dt { color: var(--grey) } dd { margin: 0; overflow-wrap: anywhere }
@media (max-width: 600px) {
  body { margin: 1rem auto; font-size: 14px }
  table { font-size: 12px } th, td { padding: .2rem } td span { display: block }
}
@page { size: A4; margin: 15mm }
@media print {
  body { font-size: 9pt; margin: 0; padding: 0; max-width: none }
  .figures { grid-template-columns: 1fr 1fr }
  .wide { overflow: visible }
  th:first-child { position: static }
  figure, tr, dl > * { break-inside: avoid }
  h2 { break-after: avoid }
}
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for line in lead %}<p{% if loop.first %} class="lead"{% endif %}>{{ line }}</p>
{% endfor %}
<div class="figures">
{% for drawing in drawings %}<figure>{{ drawing | safe }}</figure>
{% endfor %}</div>
<h2>How to read this</h2>
<ul>{% for line in reading %}<li>{{ line }}</li>
{% endfor %}</ul>
{% for table in tables %}
<h2>{{ table.title }}</h2>
<div class="wide"><table>
<thead><tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr><th class="{{ "short" if row[0] | length < 24 else "long" }}">{{ row[0] }}</th>
{%- for cell in row[1:] %}<td{% if cell.endswith(few) %} class="few"{% endif %}>
{%- for part in cell.split(" ", 1) %}<span>{{ part }}</span> {% endfor %}</td>
{%- endfor %}</tr>
{% endfor %}</tbody></table></div>
{% if table.note %}<p class="note">{{ table.note }}</p>
{% endif %}
{% endfor %}
<h2>How this was made</h2>
<dl>{% for name, value in facts.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
</body>
</html>
"""


def save_page(
    path: str | Path,
    title: str,
    lead: Sequence[str],
    tables: Sequence[Table],
    drawings: Sequence[str],
    reading: Sequence[str],
    facts: Mapping[str, str],
) -> None:
    """Write a page.

    Args:
        path: of the file.
        title: of the page.
        lead: paragraphs, the conclusion first.
        tables: in their order; the first cell of a row is its heading.
        drawings: before the tables, an SVG element each.
        reading: how to read figures and tables, a sentence each.
        facts: how the page was made, name -> text.
    """
    from jinja2 import Environment

    page = Environment(autoescape=True).from_string(_PAGE)
    values = {"title": title, "lead": lead, "tables": tables, "drawings": drawings, "reading": reading, "facts": facts}
    Path(path).write_text(page.render(**values, few=FEW), encoding="utf-8")
