"""The states of a folder: which paths stand for many, where they are, a survey of them by their
headers, and one model for all. Knows no sources and no command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from protokv.bucket import list_bucket
from protokv.errors import ConfigError, StateError, StateNotFound
from protokv.slots import SLOTS_SUFFIX
from protokv.state.checkpoint import read_state_memory_config
from protokv.state.header import StateHeader
from protokv.state.reader import StateReader
from protokv.state.store import STATE_FORMS, is_remote_state
from protokv.texts import JsonObject

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


def require_path_name(path: str) -> str:
    """Return a path that is not empty, which would be this folder. ConfigError."""
    if not path:
        raise ConfigError(
            "the name of a source or a state is empty", hint="a variable of the shell may be unset"
        )
    return path


def names_many_states(path: str) -> bool:
    """Return True if a path stands for the states below it, not for one."""
    if is_remote_state(path):
        return path.endswith("/")
    folder = Path(require_path_name(path))
    return folder.suffix not in STATE_FORMS and (folder.is_dir() or path.endswith(("/", os.sep)))


def find_states(place: str) -> list[str]:
    """Return the states below a place, sorted by name, without reading them. StateNotFound if there
    is none.
    """
    listed = list_bucket(place) if is_remote_state(place) else _walk(Path(place))
    found = sorted(
        path
        for name, path in listed
        if name.endswith(tuple(STATE_FORMS)) and not name.endswith(SLOTS_SUFFIX)
    )
    if not found:
        raise StateNotFound(
            f"there is no state in {place}", hint="ingest into it: protokv ingest VIDEOS -o DIR/"
        )
    return found


def _walk(folder: Path) -> Iterator[tuple[str, str]]:
    for where, folders, names in os.walk(folder):
        seen = [name for name in (*folders, *names) if not name.startswith(".")]
        # A .zarr is a folder itself; the name of a kept commit ends in its time and not in a
        # suffix.
        folders[:] = [
            name for name in folders if name in seen and not name.endswith(tuple(STATE_FORMS))
        ]
        yield from ((name, str(Path(where, name))) for name in seen)


def describe_states(place: str) -> Iterator[JsonObject]:
    """Yield a row per state, sorted by name: plain JSON, with unknown values as None. StateNotFound
    if there is none.

    `failure` says why a state cannot be read.
    """
    for state in find_states(place):
        row: JsonObject = {
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
            row["failure"] = " ".join(error.message.split())
        yield row


def group_by_model(states: Iterable[str]) -> list[str]:
    """Return states in order, those of one model together; those that cannot be read come last."""
    groups = dict[str, list[str]]()
    unread = list[str]()
    for state in states:
        try:
            identity = StateReader.open(state).header.backbone
            groups.setdefault(f"{identity.weights_digest} {identity.dtype}", []).append(state)
        except StateError:
            unread.append(state)
    return [*chain.from_iterable(groups.values()), *unread]


def read_recorded_damage(header: StateHeader) -> str:
    """Return the damage of the last source of a state, or of its subtitles; empty if all was
    read.
    """
    # A question needs neither room.
    from protokv.video import SourceDamage
    from protokv.words import find as words

    lost = words.read_recorded_subtitles(header.source).get("lost")
    return SourceDamage.from_dict((header.source or {}).get("damage")).message or str(lost or "")
