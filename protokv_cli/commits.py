"""The commit that a user means with `--at TIME`.

`12m` is stream time, `-10m` counts back from the last commit. For a live stream `14:05` is the time of day and a date
is a date; for a file, which has neither, `14:05` is fourteen minutes and five seconds.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from protokv.errors import ConfigError, StateNotFound
from protokv_cli.output import Output, format_time
from protokv_cli.parsing import TIME_OF_DAY, parse_duration, parse_instant

if TYPE_CHECKING:
    from protokv.state.reader import Reader

_DATE = re.compile(r"\d{4}-\d\d?-\d\d?.*", re.ASCII)


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
    clocks = reader.wall_clocks if is_date or TIME_OF_DAY.fullmatch(given) else []
    if not clocks:
        if is_date:
            raise ConfigError(
                f"{reader.path} is of a video, which has no date", hint="use a time of the video, such as 12m"
            )
        return parse_duration(given)
    wanted = parse_instant(given, now)
    found = next((at for one in reversed(clocks) if (at := one.stream_time(wanted)) > float("-inf")), None)
    if found is None:
        at, began = (f"{datetime.fromtimestamp(one):%Y-%m-%d %H:%M:%S}" for one in (wanted, clocks[0].anchors[0][1]))
        raise StateNotFound(f"{reader.path} knows nothing of {at}: its stream began at {began}")
    return float(found)


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
