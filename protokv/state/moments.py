"""Times as people write them, and the moment of a stream that one of them means.

Every function raises ConfigError, with an example as its hint, for a text that it cannot read.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from protokv.errors import ConfigError, StateNotFound

if TYPE_CHECKING:
    from protokv.state.reader import StateReader

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"\d{1,12}(?:\.\d{1,12})?"
_UNITS = re.compile(
    f"(?:(?P<h>{_NUMBER})h)?(?:(?P<m>{_NUMBER})m)?(?:(?P<s>{_NUMBER})s)?|{_NUMBER}", re.ASCII
)
_CLOCK = re.compile(
    r"(?:(?P<h>\d{1,8}):(?=\d\d:))?(?P<m>\d{1,8}):(?P<s>[0-5]\d(?:\.\d{1,12})?)", re.ASCII
)
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?.*", re.ASCII)
_TIME_OF_DAY = re.compile(r"([01]?\d|2[0-3]):[0-5]\d(:[0-5]\d)?", re.ASCII)


def parse_duration(text: str) -> float:
    """Return the seconds of `450`, `450s`, `7m30s`, `7.5m`, `7:30` or `1:02:03.5`."""
    given = text.strip().lower()
    match = _CLOCK.fullmatch(given) or _UNITS.fullmatch(given)
    if not match or not given:
        raise ConfigError(
            f"expected a length of time, got {text!r}",
            hint="for example 30s, 2m, 7m30s, 7:30 or 1.5h",
        )
    parts = {unit: float(number) for unit, number in match.groupdict().items() if number}
    return sum(number * _SECONDS[unit] for unit, number in parts.items()) if parts else float(given)


def list_instants(text: str, now: float) -> list[float]:
    """Return the moments, in seconds since 1970 and latest first, that a text may mean: an ISO date
    and time, local without a zone, or a time of day that was until `now`. ConfigError if there is
    none.

    A local time comes twice in the night when clocks go back, and never when they go forward.
    """
    given = text.strip()
    local = datetime.fromtimestamp(now)
    days = [given]
    if is_time := _TIME_OF_DAY.fullmatch(given):
        padded = given if given[2] == ":" else f"0{given}"
        days = [f"{local - timedelta(days=n):%Y-%m-%d} {padded}" for n in range(3)]
    try:
        found = set[float]()
        for one in map(datetime.fromisoformat, days):
            for fold in (0, 1):
                at = one.replace(fold=fold).timestamp()
                if one.tzinfo or datetime.fromtimestamp(at) == one:
                    found.add(at)
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"expected a time of day or a date, got {text!r}",
            hint="for example 14:05 or 2026-11-21T14:05",
        ) from None
    if not found:
        raise ConfigError(
            f"there was no {text} here: the clocks went forward",
            hint="name another time, or a zone, such as ...T02:30+01:00",
        )
    return sorted((at for at in found if at <= now or not is_time), reverse=True)


def parse_instant(text: str, now: float) -> float:
    """Return the latest moment until now that a text means, or the only one; see
    `list_instants`.
    """
    found = list_instants(text, now)
    return next((at for at in found if at <= now), found[-1])


class StreamMoment(NamedTuple):
    """A moment of a stream: its stream time in seconds, and what else the text may have meant."""

    stream_s: float
    note: str = ""


def find_stream_moment(text: str, reader: StateReader, now: float) -> StreamMoment:
    """Return the moment that a text names, such as the value of `--at`. `reader` is at the last
    commit; `now` is in seconds since 1970.

    `12m` is stream time, `-10m` counts back from the last commit. For a live stream `14:05` is the
    time of day and a date is a date; for a file, which has neither, `14:05` is fourteen minutes and
    five seconds. StateNotFound: the stream had not begun by then.
    """
    given = text.strip()
    if given.startswith("-"):
        ago_s = parse_duration(given[1:])
        return StreamMoment(max(0.0, reader.header.clock.stream_time_s - ago_s))
    is_date = bool(_DATE.fullmatch(given))
    clocks = reader.wall_clocks if is_date or _TIME_OF_DAY.fullmatch(given) else []
    if is_date and not clocks:
        raise ConfigError(
            f"{reader.path} is of a video, which has no date",
            hint="use a time of the video, such as 12m",
        )
    if not clocks:
        return StreamMoment(parse_duration(given))
    wanted = parse_instant(given, now)
    twins = [at for at in list_instants(given, now) if 0 < abs(at - wanted) < 7200]
    note = ""
    if twins:
        both = [
            f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%dT%H:%M:%S%z}"
            for at in (wanted, *twins)
        ]
        note = f"{given} came twice that night: {both[0]} is meant, {both[1]} is the other"
    found = [at for one in clocks if (at := one.stream_time(wanted)) > float("-inf")]
    if not found:
        sought, began = (
            f"{datetime.fromtimestamp(one):%Y-%m-%d %H:%M:%S}"
            for one in (wanted, clocks[0].anchors[0][1])
        )
        raise StateNotFound(f"{reader.path} knows nothing of {sought}: its stream began at {began}")
    return StreamMoment(float(found[-1]), note)
