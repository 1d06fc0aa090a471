"""The commit that a user means: `--at TIME` names a kept one, `--watch` follows the last one.

`12m` is stream time, `-10m` counts back from the last commit. For a live stream `14:05` is the time of day and a date
is a date; for a file, which has neither, `14:05` is fourteen minutes and five seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from protokv.errors import ConfigError, StateNotFound
from protokv_cli.output import Output
from protokv_cli.parsing import is_time_of_day, parse_duration, parse_instant
from protokv_cli.tables import format_time

if TYPE_CHECKING:
    from protokv.state.reader import Reader

# Seconds between two looks at a state.
LOOK_S = 2.0

_DATE = re.compile(r"\d{4}-\d\d?-\d\d?.*", re.ASCII)

pause = time.sleep


def find_stream_time(text: str, reader: Reader, now: float) -> float:
    """Return the stream time that `--at` names; `reader` is at the last commit, `now` in seconds since 1970.

    Raises:
        ConfigError: the text is no time, or it is a date and the state is of a file.
        StateNotFound: the stream had not begun by then.
    """
    given = text.strip()
    if given.startswith("-"):
        return max(0.0, reader.header.clock.stream_time_s - parse_duration(given[1:]))
    is_date = bool(_DATE.fullmatch(given))
    clocks = reader.wall_clocks if is_date or is_time_of_day(given) else []
    if is_date and not clocks:
        raise ConfigError(
            f"{reader.path} is of a video, which has no date", hint="use a time of the video, such as 12m"
        )
    if not clocks:
        return parse_duration(given)
    wanted = parse_instant(given, now)
    for clock in reversed(clocks):
        if (found := clock.stream_time(wanted)) > float("-inf"):
            return float(found)
    began = _date_text(clocks[0].anchors[0][1])
    raise StateNotFound(f"{reader.path} knows nothing of {_date_text(wanted)}: its stream began at {began}")


def _date_text(real_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", datetime.fromtimestamp(real_s).timetuple())


def commit_age_s(reader: Reader, now: float) -> float | None:
    """Return the age of a live stream's last commit; None for a file, whose states do not record it."""
    clocks = reader.wall_clocks
    return max(0.0, now - clocks[-1].committed_at) if clocks else None


def note_commit(out: Output, stream_time_s: float, at_s: float | None, age_s: float | None = None) -> None:
    """Note the stream time of the commit if it differs from `--at`; without `--at`, its age."""
    if at_s is not None and format_time(stream_time_s) != format_time(at_s):
        out.note(f"as of {format_time(stream_time_s)}, the last commit that is kept before {format_time(at_s)}")
    elif age_s is not None:
        out.note(f"as of {format_time(stream_time_s)}, committed {format_time(round(age_s, 1))} ago")


def rounds(every_s: float) -> Iterator[None]:
    """Yield now, and then whenever `every_s` seconds have passed since the last round began."""
    while True:
        began_s = time.monotonic()
        yield
        pause(max(0.0, began_s + every_s - time.monotonic()))


def await_first_commit(out: Output, state: str) -> None:
    """Return once a state exists; note once that it does not yet."""
    from protokv.state.reader import Reader

    for n, _ in enumerate(rounds(LOOK_S)):
        try:
            Reader.open(state)
        except StateNotFound as error:
            if not n:
                out.note(f"{error.message} yet; waiting for its first commit")
        else:
            return
