"""Options and their letters: how a prompt lists them, and the rules that find a letter in an answer.

Official rules expect a letter alone and are loose with other answers: three of them read "A person" as option A. The
strict rule takes a letter that stands alone or is followed by a mark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from protokv.errors import ConfigError
from protokv.replay.questions import normalize_answer

_STRICT = re.compile(r"^[\s\W]*([A-Z])(?:[).:\]]|\W*$)")


def list_options(options: Sequence[str], form: str = "{}. {}", between: str = "\n") -> str:
    """List all options, each after its letter."""
    return between.join(form.format(letter, option) for letter, option in zip(ascii_uppercase, options, strict=False))


def check_letter(letter: str, options: Sequence[str], where: str) -> str:
    """Return the letter. ConfigError: it is that of no option."""
    if letter not in list(ascii_uppercase[: len(options)]):
        raise ConfigError(f"{where}: answer {letter!r} is none of {len(options)} options")
    return letter


def strict_letter(text: str) -> str:
    """Return the letter that an answer consists of, or begins with as `B.`, `(B)` or `B:`; else an empty text."""
    found = _STRICT.match(text.strip())
    return found[1] if found else ""


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
