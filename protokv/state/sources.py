"""The records of the sources of a stream, in `Header.source`: each source, its time span, damage and wall clock.

The record of a single source is a plain JSON object. After further sources it has three more fields: `earlier`, the
records of the sources before it, and `first_step` and `start_s`, where in the stream it begins. The `fingerprint` of a
record identifies the source; `same_stream` and `is_before` compare states by it. A state is untrusted, so a field that
makes no sense is refused or left out.

The record of a live source has a `WallClockLog`: when it began, what it missed, and which stream time was which time of
day. It is bounded: it keeps the newest gaps and anchors, and counts of all. Stream times are seconds of the whole
stream, real times are seconds since 1970 in UTC.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from protokv.core.step import StreamClock
from protokv.errors import StateCorrupt
from protokv.state.header import Header
from protokv.video import Damage


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a stream that comes from one source.

    Attributes:
        first_step: its first step in the stream.
        start_s: stream time of its beginning.
        earlier: records of the sources before it, in order.
        done: True if the stream has watched it to its end.
    """

    first_step: int = 0
    start_s: float = 0.0
    earlier: tuple[Mapping[str, Any], ...] = ()
    done: bool = False

    def record(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of `Header.source` while this source is watched."""
        if not self.earlier:
            return dict(source)
        earlier = [dict(one) for one in self.earlier]
        return {**source, "first_step": self.first_step, "start_s": self.start_s, "earlier": earlier}


def segment_of(header: Header) -> Segment:
    """Return the segment of the last source of a state.

    Raises:
        StateCorrupt: its record makes no sense; the field is named.
    """
    record = header.source or {}
    earlier = record.get("earlier", [])
    first_step, start_s = record.get("first_step", 0), record.get("start_s", 0.0)
    if not isinstance(earlier, list) or not all(isinstance(one, dict) for one in earlier):
        raise StateCorrupt("source.earlier: expected a list of objects")
    if type(first_step) is not int or not 0 <= first_step <= header.clock.steps:
        raise StateCorrupt(f"source.first_step: expected a step of the stream, got {first_step!r}")
    if type(start_s) is not float or not 0 <= start_s <= header.clock.stream_time_s:
        raise StateCorrupt(f"source.start_s: expected a time of the stream, got {start_s!r}")
    return Segment(first_step, start_s, tuple(earlier), done=header.complete)


def next_segment(header: Header) -> Segment:
    """Return the segment of a source that follows everything a state has watched. Raises as `segment_of`."""
    before = segment_of(header)
    last = {name: value for name, value in (header.source or {}).items() if name != "earlier"}
    return Segment(header.clock.steps, header.clock.stream_time_s, (*before.earlier, last))


def records_of(header: Header) -> tuple[Mapping[str, Any], ...]:
    """Return the records of all sources of a state, in order. Raises as `segment_of` and `WallClockLog.of`."""
    records = (*segment_of(header).earlier, header.source or {})
    for one in records:
        WallClockLog.of(one)
    return records


def fingerprints(header: Header) -> tuple[object, ...]:
    """Return the fingerprint of each source of a state, in order; None if it has none. Raises as `segment_of`."""
    return tuple(one.get("fingerprint") for one in records_of(header))


def is_before(past: Header, now: Header) -> bool:
    """Return True if one state is an earlier moment of the stream of another. Raises as `segment_of`."""
    if past.clock.steps >= now.clock.steps or past.clock.stream_time_s >= now.clock.stream_time_s:
        return False
    return same_stream(past, now) and len(fingerprints(past)) <= len(fingerprints(now))


def same_stream(a: Header, b: Header) -> bool:
    """Return True if two states have the same model, settings and sources, as far as both have watched.

    A source without a fingerprint (a camera, frames from a program) equals no other. Raises as `segment_of`.
    """
    same = all(x is not None and x == y for x, y in zip(fingerprints(a), fingerprints(b), strict=False))
    return same and _identity(a) == _identity(b)


def _identity(header: Header) -> str:
    """Return the fields that never change within a stream, as JSON, where a list equals a tuple."""
    model = asdict(header.backbone)
    # A model may have moved.
    del model["name"], model["revision"]
    return json.dumps({"model": model, "memory": dict(header.memory), "fps": header.clock.fps}, sort_keys=True)


def sources_of(header: Header) -> list[dict[str, Any]]:
    """Return a plain JSON record of each source, in order.

    Each has `name`, `decoder`, `decoders` (frames from each), `start_s` and `end_s` (stream time), `complete` (watched
    to its end) and `damage`: None, or `message`, `frames_lost`, `frames_damaged` and `lost_from_s` (source time).
    """
    records = records_of(header)
    starts_s = [_number(one.get("start_s")) or 0.0 for one in records]
    found = []
    for i, (record, start_s) in enumerate(zip(records, starts_s, strict=True)):
        last = i == len(records) - 1
        reached_s = header.clock.stream_time_s if last else starts_s[i + 1]
        ended = header.complete or not last
        damage = Damage.from_dict(record.get("damage"))
        found.append(
            {
                "name": _text(record.get("name")),
                "decoder": _text(record.get("decoder")),
                "decoders": frames_by_decoder(record.get("decoders")),
                "start_s": start_s,
                "end_s": end_of(reached_s, start_s, record.get("duration_s"), header.clock) if ended else reached_s,
                "complete": ended,
                "damage": None if damage.ok else asdict(damage),
            }
        )
    return found


def end_of(reached_s: float, start_s: float, duration_s: object, clock: StreamClock) -> float:
    """Return the stream time at which a source ended; its last step may reach beyond that, to `reached_s`."""
    length_s = _number(duration_s)
    if length_s is None or not reached_s - clock.step_seconds < start_s + length_s < reached_s:
        return reached_s
    return start_s + length_s


def frames_by_decoder(record: object) -> dict[str, int]:
    """Return the number of watched frames from each decoder, without entries that make no sense."""
    pairs = record.items() if isinstance(record, dict) else ()
    return {name: n for name, n in pairs if isinstance(name, str) and type(n) is int and n >= 0}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


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
