"""How alike two short texts are: the same but for case, spaces and a full stop, or by their shared words."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

F1_RIGHT: Final = 0.5
F1_RULE: Final = f"offline, token F1 of {F1_RIGHT:g} or more"
"""Who decides on an open answer that nobody has read: at least so many of the words shared."""


def is_expected(answer: str, expected: str) -> bool:
    """Whether two answers are equal but for case, spaces and a final full stop."""
    return plain(answer) == plain(expected)


def token_f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall of the words of an answer, as SQuAD counts them, articles left out."""
    given, wanted = Counter(_words(answer)), Counter(_words(expected))
    if not given or not wanted:
        return float(given == wanted)
    return 2 * sum((given & wanted).values()) / (sum(given.values()) + sum(wanted.values()))


def plain(text: str) -> str:
    """Without case, further spaces and a final full stop."""
    return " ".join(text.casefold().split()).rstrip(".")


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.casefold()) if word not in ("a", "an", "the")]
