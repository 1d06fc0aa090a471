"""Survey a fleet: a row per state below a place, from its header alone, and per video that has none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protokv import storage
from protokv.errors import StateError
from protokv.fleet.plan import find_states
from protokv.fleet.records import Failure
from protokv.fleet.worker import damage_of
from protokv.storage.checkpoint import config_of
from protokv.storage.form import is_url

# The failures of the last run, a JSON object a line, beside the states.
FAILURES = "failures.jsonl"


def survey(place: str) -> Iterator[dict[str, Any]]:
    """Yield a row per state, sorted by name, then one per failed video without a state.

    A row is plain JSON: `state`, `source`, `complete`, `stream_time_s`, `steps`, `tokens_seen`, `file_bytes`, `memory`,
    `model`, `damage` and `failure`; unknown values are None. `failure` says why a state cannot be read, or why the
    video failed in the last run.

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
    """Yield the failures of the last run that name a state; damaged lines are skipped."""
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
