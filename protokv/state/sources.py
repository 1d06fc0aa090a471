"""The records of the sources of a stream, in `Header.source`: what was watched, when in the stream, with what damage.

The record of a single source is a plain JSON object. After further sources it has three more fields: `earlier`, the
records of the sources before it, and `first_step` and `start_s`, where in the stream it begins. The `fingerprint` of a
record identifies the source; `same_stream` and `is_before` compare states by it. The record of a live source has a
`WallClockLog`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from protokv.core.step import StreamClock
from protokv.errors import StateCorrupt, shown
from protokv.state.header import Header
from protokv.video import Damage


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The part of a stream that comes from one source.

    Attributes:
        first_step: its first step in the stream.
        start_s: stream time of its beginning.
        earlier: records of the sources before it, in order.
        done: True if the stream has watched it to its end.
    """

    first_step: int = 0
    start_s: float = 0.0
    earlier: tuple[dict[str, Any], ...] = ()
    done: bool = False

    def record(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of `Header.source` while this source is watched."""
        if not self.earlier:
            return dict(source)
        earlier = [dict(one) for one in self.earlier]
        return {**source, "first_step": self.first_step, "start_s": self.start_s, "earlier": earlier}


def read_source_part(header: Header) -> SourcePart:
    """Return the segment of the last source of a state. StateCorrupt if its record makes no sense."""
    known = {
        name: value for name, value in (header.source or {}).items() if name in ("first_step", "start_s", "earlier")
    }
    try:
        return msgspec.convert({**known, "done": header.complete}, SourcePart)
    except msgspec.ValidationError as error:
        raise StateCorrupt(f"source: {shown(error)}") from None


def next_source_part(header: Header) -> SourcePart:
    """Return the segment of a source that follows everything a state has watched. Raises as `read_source_part`."""
    before = read_source_part(header)
    last = {name: value for name, value in (header.source or {}).items() if name != "earlier"}
    return SourcePart(header.clock.steps, header.clock.stream_time_s, (*before.earlier, last))


def source_records(header: Header) -> tuple[Mapping[str, Any], ...]:
    """Return the records of all sources of a state, in order. Raises as `read_source_part`."""
    return (*read_source_part(header).earlier, header.source or {})


def list_fingerprints(header: Header) -> tuple[object, ...]:
    """Return the fingerprint of each source of a state, in order; None if it has none. Raises as `read_source_part`."""
    return tuple(one.get("fingerprint") for one in source_records(header))


def is_before(past: Header, now: Header) -> bool:
    """Return True if one state is an earlier moment of the stream of another. Raises as `read_source_part`."""
    if past.clock.steps >= now.clock.steps or past.clock.stream_time_s >= now.clock.stream_time_s:
        return False
    return same_stream(past, now) and len(list_fingerprints(past)) <= len(list_fingerprints(now))


def same_stream(a: Header, b: Header) -> bool:
    """Return True if two states have the same model, settings and sources, as far as both have watched.

    A source without a fingerprint (a camera, frames from a program) equals no other. Raises as `read_source_part`.
    """
    same = all(x is not None and x == y for x, y in zip(list_fingerprints(a), list_fingerprints(b), strict=False))
    return same and _identity(a) == _identity(b)


def _identity(header: Header) -> str:
    """Return the fields that never change within a stream, as JSON, where a list equals a tuple."""
    model = asdict(header.backbone)
    # A model may have moved.
    del model["name"], model["revision"]
    return json.dumps({"model": model, "memory": dict(header.memory), "fps": header.clock.fps}, sort_keys=True)


def describe_sources(header: Header) -> list[dict[str, Any]]:
    """Return a plain JSON record of each source, in order.

    Each has `name`, `decoder`, `decoders` (frames from each), `start_s` and `end_s` (stream time), `complete` (watched
    to its end) and `damage`: None, or `message`, `frames_lost`, `frames_damaged` and `lost_from_s` (source time).
    """
    try:
        records = msgspec.convert(source_records(header), tuple[_Record, ...])
    except msgspec.ValidationError as error:
        raise StateCorrupt(f"source: {shown(error)}") from None
    found = []
    for record, after in zip(records, (*records[1:], None), strict=True):
        reached_s = header.clock.stream_time_s if after is None else after.start_s
        ended = header.complete or after is not None
        damage = Damage.from_dict(record.damage)
        end_s = end_time(reached_s, record.start_s, record.duration_s, header.clock) if ended else reached_s
        row = asdict(record) | {"end_s": end_s, "complete": ended, "damage": None if damage.ok else asdict(damage)}
        del row["duration_s"]
        found.append(row)
    return found


@dataclass(frozen=True, slots=True)
class _Record:
    """What of a record is shown."""

    name: str | None = None
    decoder: str | None = None
    decoders: dict[str, int] = field(default_factory=dict)
    start_s: float = 0.0
    duration_s: float | None = None
    damage: Any = None


def end_time(reached_s: float, start_s: float, duration_s: float | None, clock: StreamClock) -> float:
    """Return the stream time at which a source ended; its last step may reach beyond that, to `reached_s`."""
    if duration_s is None or not reached_s - clock.step_seconds < start_s + duration_s < reached_s:
        return reached_s
    return start_s + duration_s
