"""All states of a fleet: a survey of them, and questions to them with one model. Knows no command line.

A survey reads headers alone. For questions, one state is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.session import Answer
from protokv.errors import StateError
from protokv.fleet.plan import find_states
from protokv.fleet.worker import Failure, read_damage
from protokv.state.reader import Reader

# The failures of a run, a JSON object a line, in the folder of the states.
FAILURES = "failures.jsonl"

_COLUMNS = "stream_time_s", "steps", "tokens_seen", "file_bytes", "memory", "model", "damage", "failure"


def survey(place: str) -> Iterator[dict[str, Any]]:
    """Yield a row per state, sorted by name.

    A row is plain JSON: `state`, `source`, `complete`, `stream_time_s`, `steps`, `tokens_seen`, `file_bytes`, `memory`,
    `model`, `damage` and `failure`, which says why a state cannot be read; unknown values are None.

    Raises:
        StateNotFound: there is no state.
    """
    for state in find_states(place):
        row: dict[str, Any] = {"state": state, "source": None, "complete": False, **dict.fromkeys(_COLUMNS)}
        try:
            reader = Reader.open(state)
            header, clock, config = reader.header, reader.header.clock, reader.config
            row |= {
                "source": (header.source or {}).get("name"),
                "complete": header.complete,
                "stream_time_s": clock.stream_time_s,
                "steps": clock.steps,
                "tokens_seen": clock.tokens_seen,
                "file_bytes": reader.file_bytes,
                "memory": f"{config.name}, {config.budget} tokens",
                "model": reader.model,
                "damage": read_damage(header) or None,
            }
        except StateError as error:
            row["failure"] = Failure.from_error(error).message
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
    """Load the model of the first readable state; arguments as for `Reader.load_backbone`.

    Raises:
        StateError: no state can be read; the first reason is given.
        ModelError: the model cannot be loaded.
    """
    reason: StateError | None = None
    for state in states:
        try:
            return Reader.open(state).load_backbone(name, revision, device=device, device_map=device_map)
        except StateError as error:
            reason = reason or error
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

    Questions are numbered from 0 in the replies. `at_s` and `verify` are those of `Reader`, `system` is that of
    `Session.stream`.

    Raises:
        ConfigError: a question is empty or contains control tokens.
    """
    for state in states:
        try:
            session = Reader.open(state, at_s=at_s, verify=verify).session(backbone)
        except StateError as error:
            yield Reply(state, 0, None, Failure.from_error(error))
            continue
        for number, question in enumerate(questions):
            yield Reply(state, number, session.ask(question, decoding, system=system))


def rank_replies(replies: Iterable[Reply], k: int) -> Iterator[tuple[int, Reply]]:
    """Yield the `k` answered replies to each question with the greatest mean log probability, with their ranks from 1.

    Of two equal ones, the earlier comes first.
    """
    answered = [(one.number, one.answer.mean_logprob, one) for one in replies if one.answer is not None]
    # Sorting is stable, so that of two equal replies the earlier stays first.
    answered.sort(key=lambda one: (one[0], -one[1]))
    for _, group in groupby(answered, key=lambda one: one[0]):
        yield from enumerate((reply for _, _, reply in islice(group, k)), start=1)
