"""What a state says that it has watched: each source, from when to when, and what could not be read of it.

A state is data from somewhere else, so what is no such record is left out. Knows no models, memories and files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protokv.backbones import EMBEDDED
from protokv.mini import WORLD_MARK
from protokv.records import StreamClock
from protokv.snapshot.schema import Header
from protokv.snapshot.sources import segment_of


def sources_of(header: Header) -> list[dict[str, Any]]:
    """A record per source, in order, plain JSON.

    Each has `name`, `decoder`, `decoders` (frames that each gave), `start_s` and `end_s` (stream time), `complete`
    (it was watched to its end) and `damage`: None, or `message`, `frames_lost`, `frames_damaged` and `lost_from_s` in
    the time of the source.
    """
    segment = segment_of(header)
    records = [*segment.earlier, header.source or {}]
    starts_s = [_number(one.get("start_s")) or 0.0 for one in records]
    found = []
    for i, (record, start_s) in enumerate(zip(records, starts_s, strict=True)):
        last = i == len(records) - 1
        reached_s = header.clock.stream_time_s if last else starts_s[i + 1]
        ended = header.complete or not last
        found.append(
            {
                "name": _text(record.get("name")),
                "decoder": _text(record.get("decoder")),
                "decoders": _counts(record.get("decoders")),
                "start_s": start_s,
                "end_s": end_of(reached_s, start_s, record.get("duration_s"), header.clock) if ended else reached_s,
                "complete": ended,
                "damage": _damage(record.get("damage")),
            }
        )
    return found


def is_beyond(model: str, comment: object) -> bool:
    """Whether a model cannot make sense of a source: the embedded one of what its world has not drawn."""
    return model == EMBEDDED and comment != WORLD_MARK


def beyond_model(header: Header) -> list[str]:
    """Names of the sources of a state that its model cannot make sense of. Frames from a program are its own affair."""
    records = [*segment_of(header).earlier, header.source or {}]
    return [
        str(one["name"])
        for one in records
        if one.get("name") is not None and is_beyond(header.backbone.name, one.get("comment"))
    ]


def end_of(reached_s: float, start_s: float, duration_s: object, clock: StreamClock) -> float:
    """Stream time at which a source ended whose last step, which may reach beyond it, ended at `reached_s`."""
    length_s = _number(duration_s)
    if length_s is None or not reached_s - clock.step_seconds < start_s + length_s < reached_s:
        return reached_s
    return start_s + length_s


def _damage(record: object) -> dict[str, Any] | None:
    if not isinstance(record, Mapping):
        return None
    return {
        "message": str(record.get("message")),
        "frames_lost": record["frames_lost"] if type(record.get("frames_lost")) is int else 0,
        "frames_damaged": record["frames_damaged"] if type(record.get("frames_damaged")) is int else 0,
        "lost_from_s": _number(record.get("lost_from_s")),
    }


def _counts(record: object) -> dict[str, int]:
    pairs = record.items() if isinstance(record, Mapping) else ()
    return {str(name): n for name, n in pairs if type(n) is int}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
