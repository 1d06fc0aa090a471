"""Options and their letters: how a prompt lists them, and the option that an answer spells out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from protokv.errors import ConfigError
from protokv.replay.questions import normalize_answer


def list_options(options: Sequence[str], form: str = "{}. {}", between: str = "\n") -> str:
    """List all options, each after its letter."""
    return between.join(form.format(letter, option) for letter, option in zip(ascii_uppercase, options, strict=False))


def check_letter(letter: str, options: Sequence[str], where: str) -> str:
    """Return the letter. ConfigError: it is that of no option."""
    if letter not in list(ascii_uppercase[: len(options)]):
        raise ConfigError(f"{where}: answer {letter!r} is none of {len(options)} options")
    return letter


def find_option(text: str, options: Sequence[str]) -> str:
    """Return the letter of the only option with this text, but for case, spaces and a full stop; else an empty text."""
    matching = [
        x
        for x, option in zip(ascii_uppercase, options, strict=False)
        if normalize_answer(option) == normalize_answer(text)
    ]
    return matching[0] if len(matching) == 1 else ""


def strip_letter(option: str) -> str:
    """Remove the letter that some files write in front of an option: `A. red` becomes `red`."""
    return re.sub(r"^\(?[A-Z][.):]\s*", "", option)
