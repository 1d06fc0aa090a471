"""The grammar of option values: settings, times, intervals, lists, and the commit that `--at TIME`
means.

Every function raises ConfigError, with an example as its hint, for a text that it cannot read.
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from protokv.errors import ConfigError, StateNotFound
from protokv_cli.output import Output, format_time

if TYPE_CHECKING:
    from protokv.ingestion import Every
    from protokv.replay.memories import SettingSweep
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


def parse_pair(
    text: str, what: str = "setting", example: str = "split=1:5 or seed=7"
) -> tuple[str, str]:
    """Return the name and the text of "name=value"."""
    name, _, value = (part.strip() for part in text.partition("="))
    if not (name and value):
        raise ConfigError(
            f"{what}: expected NAME=VALUE, got {text!r}", hint=f"for example {example}"
        )
    return name, value


def parse_setting(text: str) -> tuple[str, Any]:
    """Return name and value of "name=value": a number, true, false, "a:b" (two whole numbers) or a
    word.
    """
    name, value = parse_pair(text.replace("-", "_", text.partition("=")[0].count("-")))
    if pair := re.fullmatch(r"(\d{1,9}):(\d{1,9})", value, re.ASCII):
        return name, (int(pair[1]), int(pair[2]))
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


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


def _list_instants(text: str, now: float) -> list[float]:
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
        why = f"expected a time of day or a date, got {text!r}"
        raise ConfigError(why, hint="for example 14:05 or 2026-11-21T14:05") from None
    if not found:
        why = f"there was no {text} here: the clocks went forward"
        raise ConfigError(why, hint="name another time, or a zone, such as ...T02:30+01:00")
    return sorted((at for at in found if at <= now or not is_time), reverse=True)


def _parse_instant(text: str, now: float) -> float:
    """Return the latest moment until now that a text means, or the only one; see
    `_list_instants`.
    """
    found = _list_instants(text, now)
    return next((at for at in found if at <= now), found[-1])


def parse_every(text: str) -> Every:
    """Return how often to commit: `30s`, `2m`, `1h` of stream time, `500steps`, or `never`."""
    from protokv.ingestion import COMMIT_NEVER, Every

    if text == "never":
        return COMMIT_NEVER
    steps = re.fullmatch(r"(\d{1,12}) ?steps?", text, re.ASCII)
    try:
        return Every(n_steps=int(steps[1])) if steps else Every(seconds=parse_duration(text))
    except ConfigError:
        why = f"cannot commit every {text!r}"
        raise ConfigError(
            why, hint="use for example 30s or 2m of stream time, 500steps, or never"
        ) from None


def parse_steps(text: str) -> int | None:
    """Return a number of steps; None for `auto`."""
    if not re.fullmatch(r"\d{1,9}|auto", text, re.ASCII):
        raise ConfigError(
            f"expected a number of steps, got {text!r}", hint="for example 4, or auto"
        )
    return None if text == "auto" else int(text)


def parse_list(text: str | None) -> tuple[str, ...]:
    """Return the parts of `a,b,c`, without empty ones; None: none."""
    parts = tuple(part.strip() for part in (text or "").split(",") if part.strip())
    if text is not None and not parts:
        raise ConfigError(
            f"expected one or more, with commas between them, got {text!r}",
            hint="write it as a,b,c",
        )
    return parts


def parse_variation(text: str) -> SettingSweep:
    """Return the setting and values of `NAME=VALUE,...` or `MEMORY.NAME=VALUE,...`."""
    from protokv.replay.memories import SettingSweep

    name, values = parse_pair(text)
    memory, _, field = name.rpartition(".")
    found = {part: parse_setting(f"{field}={part}") for part in parse_list(values)}
    setting = next(iter(found.values()))[0]
    return SettingSweep(
        memory or None, setting, [(part, value) for part, (_, value) in found.items()]
    )


def open_commit_at(out: Output, state: str, at: str | None, verify: bool) -> StateReader:
    """Return the reader of the commit that `--at` means, None: the last. ConfigError,
    StateError.
    """
    from protokv.state.reader import StateReader

    reader = StateReader.open(state, verify=verify)
    return reader if at is None else reader.at(_find_stream_time(out, at, reader, time.time()))


def _find_stream_time(out: Output, text: str, reader: StateReader, now: float) -> float:
    """Return the stream time that `--at` names; `reader` is at the last commit, `now` in seconds
    since 1970.

    `12m` is stream time, `-10m` counts back from the last commit. For a live stream `14:05` is the
    time of day and a date is a date; for a file, which has neither, `14:05` is fourteen minutes and
    five seconds. StateNotFound: the stream had not begun by then.
    """
    given = text.strip()
    if given.startswith("-"):
        return max(0.0, reader.header.clock.stream_time_s - parse_duration(given[1:]))
    is_date = bool(_DATE.fullmatch(given))
    clocks = reader.wall_clocks if is_date or _TIME_OF_DAY.fullmatch(given) else []
    if is_date and not clocks:
        why = f"{reader.path} is of a video, which has no date"
        raise ConfigError(why, hint="use a time of the video, such as 12m")
    if not clocks:
        return parse_duration(given)
    wanted = _parse_instant(given, now)
    twins = [at for at in _list_instants(given, now) if 0 < abs(at - wanted) < 7200]
    if twins:
        both = (
            f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%dT%H:%M:%S%z}"
            for at in (wanted, *twins)
        )
        out.note("{} came twice that night: {} is meant, {} is the other".format(given, *both))
    found = [at for one in clocks if (at := one.stream_time(wanted)) > float("-inf")]
    if not found:
        times = (
            f"{datetime.fromtimestamp(one):%Y-%m-%d %H:%M:%S}"
            for one in (wanted, clocks[0].anchors[0][1])
        )
        raise StateNotFound(
            "{} knows nothing of {}: its stream began at {}".format(reader.path, *times)
        )
    return float(found[-1])


def show_commit_note(
    out: Output, stream_time_s: float, at_s: float | None, age_s: float | None = None
) -> None:
    """Note the stream time of the commit if it differs from `--at`; without `--at`, its age."""
    if at_s is not None and format_time(stream_time_s) != format_time(at_s):
        out.note(
            f"as of {format_time(stream_time_s)}, the last commit that is kept before "
            f"{format_time(at_s)}"
        )
    elif age_s is not None:
        out.note(
            f"as of {format_time(stream_time_s)}, committed {format_time(round(age_s, 1))} ago"
        )
