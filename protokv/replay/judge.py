"""Whether an answer is the expected one: equal but for case, spaces and a final full stop.

Right for short answers of known wording (the procedural world, yes / no, names). Open answers of other data sets need a
judge that reads; the rows hold the texts, so any such judge can be run over them.
"""

from __future__ import annotations


def is_expected(answer: str, expected: str) -> bool:
    """Compare two answers."""
    return _plain(answer) == _plain(expected)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
