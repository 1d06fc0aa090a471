"""Lengths of stream time as people write them: `30s`, `2m`, `1.5h`, `0`."""

from __future__ import annotations

import re

from protokv.errors import ConfigError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds.

    Raises:
        ConfigError: it is no length of time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    if not match:
        raise ConfigError(f"expected a length of time, got {text!r}", hint="for example 30s, 2m, 1.5h or 0")
    return float(match[1]) * _UNITS[match[2]]
