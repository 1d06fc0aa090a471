"""What a state says that it has watched: each source, from when to when, and what could not be read of it.

A state is data from somewhere else, so what is no such record is left out. Knows no models, memories and files.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from protokv.mini import WORLD_MARK, is_embedded
from protokv.records import StreamClock
from protokv.segments import records_of
from protokv.state import Header
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
