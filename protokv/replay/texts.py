"""Comparison of two short texts: equal but for case, spaces and a full stop, or by their shared words."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

F1_RIGHT: Final = 0.5
F1_RULE: Final = f"offline, token F1 of {F1_RIGHT:g} or more"
"""The rule for an open answer without a judge."""


def is_expected(answer: str, expected: str) -> bool:
    """Return True if two answers are equal but for case, spaces and a final full stop."""
    return plain(answer) == plain(expected)


def token_f1(answer: str, expected: str) -> float:
    """Return the harmonic mean of precision and recall of the words, without articles, as SQuAD counts them."""
    given, wanted = Counter(_words(answer)), Counter(_words(expected))
    if not given or not wanted:
        return float(given == wanted)
    return 2 * sum((given & wanted).values()) / (sum(given.values()) + sum(wanted.values()))


def plain(text: str) -> str:
    """Return a text without case, repeated spaces and a final full stop."""
    return " ".join(text.casefold().split()).rstrip(".")


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.casefold()) if word not in ("a", "an", "the")]
