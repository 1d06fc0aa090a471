"""All states of a fleet: a survey of them, and questions to them with one model. Knows no command line.

A survey reads headers alone. For questions, one state is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.session import Answer
from protokv.errors import StateError
from protokv.fleet.plan import find_states
from protokv.fleet.worker import Failure, read_damage
from protokv.state.api import load_state, read_header, stored_bytes
from protokv.state.checkpoint import admit, config_of, from_state, load_backbone_of, recorded_dtype
from protokv.state.form import is_url

# The failures of the last run, a JSON object a line, beside the states.
FAILURES = "failures.jsonl"


def survey(place: str) -> Iterator[dict[str, Any]]:
    """Yield a row per state, sorted by name, then one per failed video without a state.

    A row is plain JSON: `state`, `source`, `complete`, `stream_time_s`, `steps`, `tokens_seen`, `file_bytes`, `memory`,
    `model`, `damage` and `failure`; unknown values are None. `failure` says why a state cannot be read,
    or why the video failed in the last run.

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
        header, size = read_header(state), stored_bytes(state)
        config = config_of(header)
    except StateError as error:
        return _empty(state, {"message": Failure.from_error(error).message})
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
        "damage": read_damage(header) or None,
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


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a state to the question `number`, or the reason why the state cannot be asked at all."""

    state: str
    number: int
    answer: Answer | None
    failure: Failure | None = None


def load_backbone_for(
    states: Iterable[str], name: str | None, revision: str | None = None, *, device: str, device_map: str | None
) -> Backbone:
    """Load the model of the first readable state; arguments as for `load_backbone_of`.

    Raises:
        StateError: no state can be read; the first reason is given.
        ModelError: the model cannot be loaded.
    """
    reason: StateError | None = None
    for state in states:
        try:
            header = read_header(state)
            recorded_dtype(header)  # raises if the state is damaged
        except StateError as error:
            reason = reason or error
            continue
        return load_backbone_of(header, name, revision, device=device, device_map=device_map)
    raise reason or StateError("there is no state to ask")


def ask_all(
    states: Iterable[str],
    backbone: Backbone,
    questions: Sequence[str],
    decoding: Decoding,
    *,
    at_s: float | None = None,
    verify: bool = True,
    system: str | None = None,
) -> Iterator[Reply]:
    """Ask every state every question; a state of another model, or one that cannot be read, gives one failed reply.

    Questions are numbered from 0 in the replies. `at_s` and `verify` are those of `load_state`, `system` is that of
    `Session.stream`.

    Raises:
        ConfigError: a question is empty or contains control tokens.
    """
    for state in states:
        try:
            found = load_state(state, verify=verify, at_s=at_s, admit=admit)
            session = from_state(found, backbone)
        except StateError as error:
            yield Reply(state, 0, None, Failure.from_error(error))
            continue
        for number, question in enumerate(questions):
            yield Reply(state, number, session.ask(question, decoding, system=system))


def surest(replies: Iterable[Reply], k: int) -> Iterator[tuple[int, Reply]]:
    """Yield the `k` answered replies to each question with the greatest mean log probability, with their ranks from 1.

    Of two equal ones, the earlier comes first.
    """
    by_question: dict[int, list[Reply]] = {}
    for reply in replies:
        by_question.setdefault(reply.number, []).append(reply)
    for number in sorted(by_question):
        ranked = sorted(by_question[number], key=_mean_logprob, reverse=True)
        yield from enumerate(ranked[:k], start=1)


def _mean_logprob(reply: Reply) -> float:
    assert reply.answer is not None
    return reply.answer.mean_logprob
