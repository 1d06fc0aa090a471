"""Which moment of a stream a user means, and which one it was that answered.

`12m` is stream time, `-10m` so long before the last commit. Of a live stream `14:05` is the time of day and a date is a
date; of a file, which has neither, `14:05` is fourteen minutes and five seconds.
"""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from protokv.errors import ConfigError, StateNotFound
from protokv_cli.output import Output
from protokv_cli.parsing import is_time_of_day, parse_duration, parse_instant
from protokv_cli.tables import time_text

if TYPE_CHECKING:
    from protokv.core.snapshot import Header

_DATE = re.compile(r"\d{4}-\d\d?-\d\d?.*", re.ASCII)


def stream_time_of(text: str, state: str, header: Header, now: float) -> float:
    """The stream time that `--at` names, for one state whose last commit has this header.

    Raises:
        ConfigError: it is no time, or one of day where the state has none.
        StateNotFound: the stream had not begun by then.
    """
    given = text.strip()
    if given.startswith("-"):
        return max(0.0, header.clock.stream_time_s - parse_duration(given[1:]))
    if _DATE.fullmatch(given) or is_time_of_day(given):
        lived = _lived(header)
        if lived or _DATE.fullmatch(given):
            return _at_real_time(given, state, lived, now)
    return parse_duration(given)


def _at_real_time(text: str, state: str, lived: list[Any], now: float) -> float:
    if not lived:
        raise ConfigError(f"{state} is of a video, which has no date", hint="use a time of the video, such as 12m")
    wanted = parse_instant(text, now)
    for chronicle in reversed(lived):
        if (found := chronicle.stream_time(wanted)) > float("-inf"):
            return float(found)
    began = _date(lived[0].anchors[0][1])
    raise StateNotFound(f"{state} knows nothing of {_date(wanted)}: its stream began at {began}")


def _lived(header: Header) -> list[Any]:
    """The chronicles of the live sources of a state, in order."""
    from protokv.storage.wall_clock import WallClockLog
    from protokv.storage.watched import records_of

    return [found for one in records_of(header) if (found := WallClockLog.of(one)) is not None]


def commit_age_s(header: Header, now: float) -> float | None:
    """How long ago a commit of a live stream was made; None of a file, whose states do not say when."""
    lived = _lived(header)
    return max(0.0, now - lived[-1].committed_at) if lived else None


def tell_commit(out: Output, stream_time_s: float, at_s: float | None, age_s: float | None = None) -> None:
    """Say where the commit stands that was chosen for `--at`, if it is not exactly there; else how old it is."""
    if at_s is not None and time_text(stream_time_s) != time_text(at_s):
        out.note(f"as of {time_text(stream_time_s)}, the last commit that is kept before {time_text(at_s)}")
    elif age_s is not None:
        out.note(f"as of {time_text(stream_time_s)}, committed {time_text(round(age_s, 1))} ago")


def _date(real_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", datetime.fromtimestamp(real_s).timetuple())
