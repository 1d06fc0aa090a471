"""`WallClockLog`: when a live stream began, what it missed, and which stream time was which time of day.

It is in the record of its source. It is bounded: it keeps the newest gaps and anchors, and counts of all. Stream times
are seconds of the whole stream, real times are seconds since 1970 in UTC.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from protokv.errors import StateCorrupt

# The newest gaps and anchors are kept.
MOST = 64

# Smaller differences are adjustments of a clock.
STEADY_S = 2.0


@dataclass(frozen=True, slots=True)
class Gap:
    """The source was lost from stream time `from_s` to `to_s` (None: it still is); `why` in a few words."""

    from_s: float
    to_s: float | None
    why: str


@dataclass(slots=True)
class WallClockLog:
    """The times and the gaps of a live stream.

    Attributes:
        stream: identifies this stream; another stream of the same camera has another.
        anchors: pairs of stream time and real time; both run alike between two of them. The first is the beginning.
        gaps: the newest gaps, oldest first.
        gaps_in_all: how many gaps there were.
        lost_s: their total length.
        frames_dropped: sampled frames that the model had no time for.
        frames_damaged: frames that could not be decoded, or are damaged.
        committed_at: real time of this commit.
    """

    stream: str = field(default_factory=lambda: uuid.uuid4().hex)
    anchors: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    gaps_in_all: int = 0
    lost_s: float = 0.0
    frames_dropped: int = 0
    frames_damaged: int = 0
    committed_at: float = 0.0

    def add_anchor(self, stream_s: float, real_s: float) -> None:
        """Note the real time at a stream time; keep it if it does not follow from the anchors."""
        if not self.anchors or abs(self.real_time(stream_s) - real_s) > STEADY_S:
            del self.anchors[1 : max(1, len(self.anchors) - MOST + 2)]
            self.anchors.append((stream_s, real_s))

    def begin_gap(self, from_s: float, why: str) -> None:
        """Begin a gap, unless the source is lost already."""
        if not self.lost:
            self.gaps = [*self.gaps[1 - MOST :], Gap(from_s, None, " ".join(why.split())[:200])]
            self.gaps_in_all += 1

    def end_gap(self, to_s: float) -> Gap | None:
        """End the gap and return it; None if there was none."""
        if not self.lost:
            return None
        self.gaps[-1] = gap = replace(self.gaps[-1], to_s=max(to_s, self.gaps[-1].from_s))
        self.lost_s += to_s - gap.from_s
        return gap

    @property
    def lost(self) -> bool:
        """True while the source is lost."""
        return bool(self.gaps) and self.gaps[-1].to_s is None

    def real_time(self, stream_s: float) -> float:
        """Return the real time at a stream time, by the last anchor before it."""
        known = [one for one in self.anchors if one[0] <= stream_s] or self.anchors[:1]
        return known[-1][1] + stream_s - known[-1][0]

    def stream_time(self, real_s: float) -> float:
        """Return the stream time at a real time; minus infinity before the beginning."""
        until_s = math.inf
        for stream_s, since_s in reversed(self.anchors):
            if since_s <= real_s:
                # Real time between two anchors may be longer than stream time; the rest belongs to the next anchor.
                return min(stream_s + real_s - since_s, until_s)
            until_s = stream_s
        return -math.inf

    def describe(self) -> dict[str, Any]:
        """Describe the log for people, with real times as dates in UTC."""
        plain = asdict(self)
        del plain["stream"], plain["anchors"], plain["committed_at"]
        gaps = [{"from": _format_date(self.real_time(one.from_s)), **asdict(one)} for one in self.gaps]
        dates = {"began": _format_date(self.anchors[0][1]), "committed": _format_date(self.committed_at)}
        return {**dates, "lost": self.lost, **plain, "gaps": gaps}

    @classmethod
    def read(cls, source: Mapping[str, Any] | None) -> WallClockLog | None:
        """Return the log in the record of a source; None if it was not live. StateCorrupt if it makes no sense."""
        record = (source or {}).get("live")
        if record is None:
            return None
        try:
            found = msgspec.convert(record, cls)
            found.describe()
        except (msgspec.ValidationError, LookupError, ValueError, OverflowError) as error:
            raise StateCorrupt("source.live: it makes no sense") from error
        return found


def _format_date(real_s: float) -> str:
    return datetime.fromtimestamp(real_s, UTC).isoformat(timespec="seconds")
