"""The grammar of option values: times, intervals, lists, seeds and ranges. Knows no option and no command."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from protokv.config import parse_setting
from protokv.errors import ConfigError

if TYPE_CHECKING:
    from protokv.ingestion import Every
    from protokv.replay.studies import Variation

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds from `30s`, `2m`, `1.5h` or `0`.

    Raises:
        ConfigError: the text is no length of time.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([smh]?)", text.strip().lower(), re.ASCII)
    if not match:
        raise ConfigError(f"expected a length of time, got {text!r}", hint="for example 30s, 2m, 1.5h or 0")
    return float(match[1]) * _SECONDS[match[2]]


def parse_every(text: str | None) -> Every:
    """How often to commit: `30s`, `2m`, `1h` of stream time, `500steps`, or `never`; every minute of the clock if None.

    Raises:
        ConfigError: the text is none of these, or not above zero.
    """
    from protokv.ingestion import MINUTELY, NEVER, Every

    if text is None:
        return MINUTELY
    if text.strip().lower() == "never":
        return NEVER
    steps = re.fullmatch(r"(\d{1,12}) ?steps?", text.strip().lower(), re.ASCII)
    try:
        return Every(n_steps=int(steps[1])) if steps else Every(seconds=parse_duration(text))
    except ConfigError:
        raise ConfigError(
            f"cannot commit every {text!r}", hint="use for example 30s or 2m of stream time, 500steps, or never"
        ) from None


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


def parse_variation(text: str) -> Variation:
    """A setting and its values from `NAME=VALUE,...` or `MEMORY.NAME=VALUE,...`.

    Raises:
        ConfigError: there is no name or no value.
    """
    from protokv.replay.studies import Variation

    name, _, values = text.partition("=")
    memory, _, field = name.strip().rpartition(".")
    parts = parse_list(values)
    if not parts:
        parse_setting(text)
    settings = [parse_setting(f"{field}={part}") for part in parts]
    return Variation(
        memory or None, settings[0][0], [(part, value) for part, (_, value) in zip(parts, settings, strict=True)]
    )
