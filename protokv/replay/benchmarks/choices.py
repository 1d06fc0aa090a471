"""Options and their letters: how a prompt lists them, and the rules that find a letter in an answer.

Official rules are loose where models are expected to answer with a letter alone: "A person" is option A to three of
them. The strict rule takes a letter that stands alone or is closed by a mark. Knows no data set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from protokv.errors import ConfigError
from protokv.replay.texts import plain

_STRICT = re.compile(r"^[\s\W]*([A-Z])(?:[).:\]]|\W*$)")


def list_options(options: Sequence[str], form: str = "{}. {}", between: str = "\n") -> str:
    """All options, each behind its letter."""
    return between.join(form.format(letter, option) for letter, option in zip(ascii_uppercase, options, strict=False))


def check_letter(letter: str, options: Sequence[str], where: str) -> str:
    """The letter, which must be that of an option.

    Raises:
        ConfigError: it is not.
    """
    if letter not in list(ascii_uppercase[: len(options)]):
        raise ConfigError(f"{where}: answer {letter!r} is none of {len(options)} options")
    return letter


def letter_of(options: Sequence[str], answer: str) -> str:
    """The letter of the option that is this text; empty if none is."""
    return next((letter for letter, option in zip(ascii_uppercase, options, strict=False) if option == answer), "")


def strict_letter(text: str) -> str:
    """The letter that an answer consists of, or begins with as `B.`, `(B)` or `B:`; empty if there is none."""
    found = _STRICT.match(text.strip())
    return found[1] if found else ""


def first_of(letters: str, text: str) -> str:
    """The first of some letters anywhere in a text; empty if there is none."""
    return next((character for character in text if character in letters), "")


def before_parenthesis(text: str) -> str:
    """The character before the first `)`; the whole text if there is none."""
    place = text.find(")")
    return text if place < 0 else text[max(0, place - 1) : place]


def named_option(text: str, options: Sequence[str]) -> str:
    """The letter of the option that a free answer spells out, whatever its case and its full stop; empty if none.

    For models that were asked the bare question and know no letters.
    """
    matching = [
        letter for letter, option in zip(ascii_uppercase, options, strict=False) if plain(option) == plain(text)
    ]
    return matching[0] if len(matching) == 1 else ""


def strip_letter(option: str) -> str:
    """An option without the letter that some files write in front of it: `A. red` is `red`."""
    return re.sub(r"^\(?[A-Z][.):]\s*", "", option)
