"""What a state says that it has watched: each source, from when to when, and what could not be read of it.

A state is data from somewhere else, so what is no such record is left out. Knows no models, memories and files.

What a stream has watched, in order: how `Header.source` lists one video or several.

A state of one video holds what is known of it and nothing else. Where others were watched before, three fields are
added: `earlier`, the same kind of record for each of them in order, and `first_step` and `start_s`, where in the stream
the last one begins. From this follows whether two states are of one stream. Knows nothing of videos: a record is a JSON
object, and its `fingerprint` tells it from others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from protokv.core.snapshot import Header
from protokv.core.step import StreamClock
from protokv.errors import StateCorrupt
from protokv.mini import WORLD_MARK, is_embedded
from protokv.video import Damage


def sources_of(header: Header) -> list[dict[str, Any]]:
    """A record per source, in order, plain JSON.

    Each has `name`, `decoder`, `decoders` (frames that each gave), `start_s` and `end_s` (stream time), `complete`
    (it was watched to its end) and `damage`: None, or `message`, `frames_lost`, `frames_damaged` and `lost_from_s` in
    the time of the source.
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


def is_beyond(model: str, comment: object) -> bool:
    """Whether a model cannot make sense of a source: an embedded one of what its world has not drawn."""
    return is_embedded(model) and comment != WORLD_MARK


def beyond_model(header: Header) -> list[str]:
    """Names of the sources of a state that its model cannot make sense of. Frames from a program are its own affair."""
    return [
        str(one["name"])
        for one in records_of(header)
        if one.get("name") is not None and is_beyond(header.backbone.name, one.get("comment"))
    ]


def end_of(reached_s: float, start_s: float, duration_s: object, clock: StreamClock) -> float:
    """Stream time at which a source ended whose last step, which may reach beyond it, ended at `reached_s`."""
    length_s = _number(duration_s)
    if length_s is None or not reached_s - clock.step_seconds < start_s + length_s < reached_s:
        return reached_s
    return start_s + length_s


def frames_by_decoder(said: object) -> dict[str, int]:
    """How many of the watched frames each decoder gave, as a state says it; none where that makes no sense."""
    pairs = said.items() if isinstance(said, dict) else ()
    return {name: n for name, n in pairs if isinstance(name, str) and type(n) is int and n >= 0}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a stream that a source fills.

    Attributes:
        first_step: the step of the stream that is its first one.
        start_s: stream time at its beginning.
        earlier: records of what was watched before it, in order.
        done: the stream has watched it to its end.
    """

    first_step: int = 0
    start_s: float = 0.0
    earlier: tuple[Mapping[str, Any], ...] = ()
    done: bool = False

    def record(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """What goes into `Header.source` while this source is watched."""
        if not self.earlier:
            return dict(source)
        earlier = [dict(one) for one in self.earlier]
        return {**source, "first_step": self.first_step, "start_s": self.start_s, "earlier": earlier}


def segment_of(header: Header) -> Segment:
    """Where the last source of a state stands.

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
    """Where a source stands that is watched after everything that a state has watched. Raises as `segment_of`."""
    before = segment_of(header)
    last = {name: value for name, value in (header.source or {}).items() if name != "earlier"}
    return Segment(header.clock.steps, header.clock.stream_time_s, (*before.earlier, last))


def records_of(header: Header) -> tuple[Mapping[str, Any], ...]:
    """What a state says of each source that it has watched, in order. Raises as `segment_of`."""
    return (*segment_of(header).earlier, header.source or {})


def fingerprints(header: Header) -> tuple[object, ...]:
    """What tells the sources of a state apart, in order; None for one that says nothing. Raises as `segment_of`."""
    return tuple(one.get("fingerprint") for one in records_of(header))


def is_before(past: Header, now: Header) -> bool:
    """Whether one state is an earlier moment of the stream of another."""
    if past.clock.steps >= now.clock.steps or past.clock.stream_time_s >= now.clock.stream_time_s:
        return False
    return same_stream(past, now) and len(fingerprints(past)) <= len(fingerprints(now))


def same_stream(a: Header, b: Header) -> bool:
    """Whether two states are moments of one stream: what one of them has watched begins as what the other has.

    A source without a fingerprint (a camera, frames from a program) is equal to none. Raises as `segment_of`.
    """
    same = all(x is not None and x == y for x, y in zip(fingerprints(a), fingerprints(b), strict=False))
    return same and _identity(a) == _identity(b)


def _identity(header: Header) -> str:
    """What stays the same through a stream, as text: a list and a tuple are the same setting."""
    model = asdict(header.backbone)
    # Where it was found.
    del model["name"], model["revision"]
    return json.dumps({"model": model, "memory": dict(header.memory), "fps": header.clock.fps}, sort_keys=True)
