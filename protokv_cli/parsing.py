"""The grammar of option values: lists, seeds and ranges. Knows no option and no command."""

from __future__ import annotations

from protokv.errors import ConfigError


def parse_list(text: str) -> list[str]:
    """The parts of `a,b,c`, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_seeds(text: str) -> range:
    """Seeds from `SEED` or `SEED:COUNT`: SEED, SEED + 1 and so on.

    Raises:
        ConfigError: the text is neither.
    """
    seed, colon, count = text.partition(":")
    if not seed.isdecimal() or (colon and not count.isdecimal()) or (colon and int(count) == 0):
        raise ConfigError(f"world: expected SEED or SEED:COUNT, got {text!r}", hint="for example --world 7:20")
    return range(int(seed), int(seed) + (int(count) if colon else 1))


def parse_scene(text: str) -> tuple[int, int] | None:
    """Shortest and longest scene in seconds from `SHORTEST:LONGEST`; None of `none`.

    Raises:
        ConfigError: the text is neither.
    """
    if text == "none":
        return None
    shortest, colon, longest = text.partition(":")
    if not (colon and shortest.isdecimal() and longest.isdecimal()):
        raise ConfigError(f"cuts: expected SHORTEST:LONGEST in seconds or none, got {text!r}", hint="such as 6:20")
    return int(shortest), int(longest)
