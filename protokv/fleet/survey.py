"""What a fleet has come to: a row per state below a place, from its header alone, and per video that has none why.

Knows no tables and no terminals. Rows are plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protokv import storage
from protokv.errors import StateError
from protokv.fleet.outcome import Failure, damage_of
from protokv.fleet.plan import find_states
from protokv.storage.checkpoint import config_of
from protokv.storage.form import is_url

FAILURES = "failures.jsonl"
"""What the last run of a fleet could not do, a JSON object a line, beside its states."""


def survey(place: str) -> Iterator[dict[str, Any]]:
    """A row per state, sorted by name, and behind them one per video that failed and has none.

    A row has `state`, `source`, `complete`, `stream_time_s`, `steps`, `tokens_seen`, `file_bytes`, `memory`, `model`,
    `damage` and `failure`; what is not known is None. `failure` says why a state cannot be read, or what the last run
    said of the video.

    Raises:
        StateNotFound: there is neither a state nor a failure.
    """
    failed = {row["state"]: row for row in _failures(place)}
    try:
        states = find_states(place)
    except StateError:
        if not failed:
            raise
        states = []
    for state in states:
        yield _row(state, failed.pop(state, None))
    for state, row in failed.items():
        yield _empty(state, row)


def _row(state: str, failed: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        header, size = storage.read_header(state), storage.stored_bytes(state)
        config = config_of(header)
    except StateError as error:
        return _empty(state, {"message": Failure.of(error).message})
    return {
        "state": state,
        "source": (header.source or {}).get("name"),
        "complete": header.complete,
        "stream_time_s": header.clock.stream_time_s,
        "steps": header.clock.steps,
        "tokens_seen": header.clock.tokens_seen,
        "file_bytes": size,
        "memory": f"{config.name}, {config.budget} tokens",
        "model": header.backbone.name,
        "damage": damage_of(header) or None,
        "failure": None if failed is None else failed.get("message"),
    }


def _empty(state: str, failed: Mapping[str, Any]) -> dict[str, Any]:
    unknown = ("stream_time_s", "steps", "tokens_seen", "file_bytes", "memory", "model", "damage")
    row: dict[str, Any] = {"state": state, "source": failed.get("source"), "complete": False}
    return row | dict.fromkeys(unknown) | {"failure": failed.get("message")}


def _failures(place: str) -> Iterator[dict[str, Any]]:
    """The failures of the last run that name a state; none where there is no such list, or what is there is none."""
    if is_url(place):
        return
    try:
        lines = Path(place, FAILURES).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("state"), str):
            yield row
