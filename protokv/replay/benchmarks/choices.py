"""Options and their letters, as a prompt lists them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from protokv.errors import ConfigError


def list_options(options: Sequence[str], form: str = "{}. {}", between: str = "\n") -> str:
    """List all options, each after its letter."""
    return between.join(form.format(letter, option) for letter, option in zip(ascii_uppercase, options, strict=False))


def check_letter(letter: str, options: Sequence[str], where: str) -> str:
    """Return the letter. ConfigError: it is that of no option."""
    if letter not in list(ascii_uppercase[: len(options)]):
        raise ConfigError(f"{where}: answer {letter!r} is none of {len(options)} options")
    return letter


def strip_letter(option: str) -> str:
    """Remove the letter that some files write in front of an option: `A. red` becomes `red`."""
    return re.sub(r"^\(?[A-Z][.):]\s*", "", option)
