"""The wall clock log of a live stream: when it began, what it missed, and which stream time was which time of day.

It is part of the record of a live source in a state; a file has none. It is bounded: it keeps the newest gaps and
anchors, and counts of all. Stream times are seconds of the whole stream, real times are seconds since 1970 in UTC.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from protokv.errors import StateCorrupt

# The newest ones are kept.
MOST_GAPS = 64
MOST_ANCHORS = 64

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

    def anchor(self, stream_s: float, real_s: float) -> None:
        """Note the real time at a stream time; keep it if it does not follow from the anchors."""
        if not self.anchors or abs(self.real_time(stream_s) - real_s) > STEADY_S:
            del self.anchors[1 : max(1, len(self.anchors) - MOST_ANCHORS + 2)]
            self.anchors.append((stream_s, real_s))

    def lose(self, from_s: float, why: str) -> None:
        """Begin a gap, unless the source is lost already."""
        if not self.lost:
            self.gaps = [*self.gaps[1 - MOST_GAPS :], Gap(from_s, None, " ".join(why.split())[:200])]
            self.gaps_in_all += 1

    def find(self, to_s: float) -> Gap | None:
        """End the gap and return it; None if there was none."""
        if not self.lost:
            return None
        gap = replace(self.gaps[-1], to_s=max(to_s, self.gaps[-1].from_s))
        self.gaps[-1] = gap
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
        known = [(i, one) for i, one in enumerate(self.anchors) if one[1] <= real_s]
        if not known:
            return -math.inf
        i, (stream_s, since_s) = known[-1]
        # Real time between two anchors may be longer than stream time; the rest belongs to the next anchor.
        limit_s = self.anchors[i + 1][0] if i + 1 < len(self.anchors) else math.inf
        return min(stream_s + real_s - since_s, limit_s)

    def describe(self) -> dict[str, Any]:
        """Describe the log for people, with real times as dates in UTC."""
        return {
            "began": _date(self.anchors[0][1]),
            "committed": _date(self.committed_at),
            "lost": self.lost,
            "gaps": [
                {"from": _date(self.real_time(one.from_s)), "from_s": one.from_s, "to_s": one.to_s, "why": one.why}
                for one in self.gaps
            ],
            "gaps_in_all": self.gaps_in_all,
            "lost_s": self.lost_s,
            "frames_dropped": self.frames_dropped,
            "frames_damaged": self.frames_damaged,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def of(cls, source: Mapping[str, Any] | None) -> WallClockLog | None:
        """Return the log in the record of a source; None if it was not live.

        Raises:
            StateCorrupt: the log makes no sense.
        """
        record = (source or {}).get("live")
        if record is None:
            return None
        try:
            # A text without NaN and infinities, which msgspec would accept.
            found = msgspec.json.decode(json.dumps(record, allow_nan=False), type=cls)
            complete = record.keys() >= set(cls.__slots__)
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError) as error:
            raise StateCorrupt("source.live: it makes no sense") from error
        if not complete or not 1 <= len(found.anchors) <= MOST_ANCHORS or len(found.gaps) > MOST_GAPS:
            raise StateCorrupt("source.live: it is incomplete, or has more gaps or anchors than are kept")
        return found


def _date(real_s: float) -> str:
    try:
        return datetime.fromtimestamp(real_s, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "-"
