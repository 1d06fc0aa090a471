"""Foreign text for a terminal: shown, never obeyed. Every text that this program writes goes through here.

A file name, a state, a video or a model can hold whatever bytes its author liked: escape sequences that rename the
window or hide a line, controls that overwrite one, marks that turn the direction of writing. What is not printable is
written as its escape, `\\x1b`, so that it can be seen.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

# Formats that join letters in Persian, Indic scripts and emoji, and direct nothing.
_JOINERS = frozenset("\u200c\u200d")
_LINES = frozenset("\n\t")


def printable(text: object, *, lines: bool = False) -> str:
    """A text on one line without control, format, private and unpaired characters.

    Args:
        text: anything; what `str` makes of it is shown.
        lines: leave line feeds and tabs as they are.
    """
    found = str(text)
    if found.isascii() and found.isprintable():
        return found
    return "".join(c if _shown(c) or (lines and c in _LINES) else _escape(c) for c in found)


def json_text(value: Any) -> str:
    """JSON on one line; characters that are not printable stand in it as `\\uXXXX`, which every reader reads back."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _shown(c) else json.dumps(c)[1:-1] for c in text)


def _shown(c: str) -> bool:
    # Other spaces than " " count as unprintable to Python; they are blank, and that is all.
    return c.isprintable() or c in _JOINERS or unicodedata.category(c) == "Zs"


def _escape(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode("ascii")
