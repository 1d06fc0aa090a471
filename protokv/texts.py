r"""Text and JSON from outside: what is taken, and how much of it. Knows no files and no web.

Half of a surrogate pair is no character: Python gets it from `\ud800` in JSON and from bytes that
are not UTF-8, and cannot write it. Such text is refused where it comes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from protokv.errors import QuestionError

JsonObject = dict[str, Any]
"""An object of JSON: its values are plain."""
JsonRecord = Mapping[str, Any]
"""An object of JSON that is read and never changed."""
Keywords = dict[str, Any]
"""Arguments by name."""

# A token seldom has more than ten characters, and no question has more than 4,096 tokens.
MOST_QUESTION_CHARACTERS = 1 << 16


def check_question_text(question: str, where: str = "the question") -> str:
    """Return a question that a tokenizer can be given. Costs nothing for a long one.

    Raises:
        QuestionError: it is empty, too long, or has characters that are none; the message begins
            with `where`.
    """
    if not question or question.isspace():
        raise QuestionError(
            f"{where} is empty", hint="ask something, for example: What shape appeared first?"
        )
    if len(question) > MOST_QUESTION_CHARACTERS:
        size = f"{len(question):,} characters; the most is {MOST_QUESTION_CHARACTERS:,}"
        raise QuestionError(f"{where} has {size}", hint="ask something shorter")
    if (place := find_invalid_character(question)) is not None:
        raise QuestionError(
            f"{where} is not text: character {place + 1} is none", hint="write it as UTF-8"
        )
    return question


def find_invalid_character(text: str) -> int | None:
    """Return where text has its first zero or half of a surrogate pair; None if it has none."""
    return next((i for i, c in enumerate(text) if c == "\0" or "\ud800" <= c <= "\udfff"), None)


def parse_strict_json(data: bytes | str) -> Any:
    """Return the value of JSON: UTF-8, whole surrogate pairs, finite numbers, as Python's own
    parser does not ask.

    ValueError: it is anything else, or deeper than Python's recursion; in one line.
    """
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shorten_text(text: str, most: int = 500) -> str:
    """Return text for a message or a terminal; of a long one the beginning, and how much is left
    out.
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} more characters)"


def format_count(n: int, what: str) -> str:
    """Return a count such as `1 step` or `12,000 steps`."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
