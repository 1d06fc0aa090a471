"""All states of a fleet: a survey of them by their headers, and one model for all of them. Knows no
command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from protokv.core.backbone import Backbone
from protokv.errors import StateError
from protokv.fleet.plan import find_fleet_states
from protokv.fleet.worker import VideoFailure, read_recorded_damage
from protokv.state.checkpoint import read_state_memory_config
from protokv.state.reader import StateReader
from protokv.stream.opening import load_recorded_backbone

_COLUMNS = (
    "stream_time_s",
    "steps",
    "tokens_seen",
    "file_bytes",
    "memory",
    "model",
    "damage",
    "failure",
)


def describe_fleet_states(place: str) -> Iterator[dict[str, Any]]:
    """Yield a row per state, sorted by name: plain JSON, with unknown values as None. StateNotFound
    if there is none.

    `failure` says why a state cannot be read.
    """
    for state in find_fleet_states(place):
        row: dict[str, Any] = {
            "state": state,
            "source": None,
            "complete": False,
            **dict.fromkeys(_COLUMNS),
        }
        try:
            reader = StateReader.open(state)
            header = reader.header
            clock = reader.header.clock
            config = read_state_memory_config(reader.header)
            row |= {
                "source": (header.source or {}).get("name"),
                "complete": header.complete,
                **{
                    name: getattr(clock, name) for name in ("stream_time_s", "steps", "tokens_seen")
                },
                "file_bytes": reader.file_bytes,
                "memory": f"{config.name}, {config.budget} tokens",
                "model": header.backbone.name,
                "damage": read_recorded_damage(header) or None,
            }
        except StateError as error:
            row["failure"] = VideoFailure.from_error(error).message
        yield row


def load_backbone_for_states(
    states: Iterable[str],
    name: str | None,
    revision: str | None = None,
    *,
    device: str,
    device_map: str | None,
) -> Backbone:
    """Load the model of the first readable state; arguments as for `load_recorded_backbone`.

    StateError: no state can be read; the first reason is given. ModelError: the model cannot be
    loaded.
    """
    reasons = list[StateError]()
    for state in states:
        try:
            header = StateReader.open(state).header
            return load_recorded_backbone(
                header, name, revision, device=device, device_map=device_map
            )
        except StateError as error:
            reasons.append(error)
    raise reasons[0]
