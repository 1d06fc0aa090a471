"""A report as one self-contained HTML page: facts, the figure as inline SVG, and the tables."""

from __future__ import annotations

import io
from datetime import datetime
from pathlib import Path
from typing import Final

from protokv.replay.figure import draw
from protokv.replay.tables import Report, list_facts, tabulate
from protokv.version import __version__

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Accuracy against delay</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #1a1a1a }
figure, .wide { margin: 0 0 1.5rem; overflow-x: auto }
svg { width: 100%; min-width: 700px; height: auto }
table { border-collapse: collapse }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child { text-align: left }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem }
dt { color: #666 } dd { margin: 0; overflow-wrap: anywhere }
</style>
</head>
<body>
<h1>Accuracy against delay</h1>
<dl>{% for name, value in facts.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
<figure>{{ figure | safe }}</figure>
{% for table in tables %}
<h2>{{ table.title }}</h2>
<div class="wide"><table>
<tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr><th>{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
</body>
</html>
"""


def save_page(report: Report, path: str | Path, *, made: datetime | None = None, command: str | None = None) -> None:
    """Write the page.

    Args:
        report: of `summarise`.
        path: of the page.
        made: when the report was made.
        command: the command that made it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    from jinja2 import Environment

    drawn = io.StringIO()
    draw(report).savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    facts = list_facts(report) | {"written by": f"protokv {__version__}"}
    if command:
        facts["command"] = command
    if made:
        facts["made"] = f"{made:%Y-%m-%d %H:%M %Z}".strip()
    page = Environment(autoescape=True).from_string(_PAGE)
    # HTML has no place for the XML prologue of the figure.
    text = page.render(facts=facts, figure=svg[svg.index("<svg") :], tables=list(tabulate(report)))
    Path(path).write_text(text, encoding="utf-8")
