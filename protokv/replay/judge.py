"""Whether an answer is the expected one: equal but for case, spaces and a final full stop.

This serves short answers of known wording (the procedural world, yes / no, names). Open answers need a judge that
reads; rows hold the texts, so one can be run over them later.
"""

from __future__ import annotations


def is_expected(answer: str, expected: str) -> bool:
    """Compare two answers."""
    return _plain(answer) == _plain(expected)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
