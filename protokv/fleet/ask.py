"""Questions to all states of a fleet with one model, and the answers that the model is surest of.

One state is in memory at a time. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from protokv import storage
from protokv.backbones.base import Backbone
from protokv.core.decoding import Decoding
from protokv.core.session import Answer
from protokv.errors import StateError
from protokv.fleet.records import Failure
from protokv.storage.checkpoint import admit, from_state, load_backbone_of, recorded_dtype
from protokv.storage.watched import beyond_model


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a state to the question `number`, or the reason why the state cannot be asked at all.

    `beyond` names the sources of the state that the model cannot understand.
    """

    state: str
    number: int
    answer: Answer | None
    failure: Failure | None = None
    beyond: tuple[str, ...] = ()


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
            header = storage.read_header(state)
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
) -> Iterator[Reply]:
    """Ask every state every question; a state of another model, or one that cannot be read, gives one failed reply.

    Questions are numbered from 0 in the replies. `at_s` and `verify` are those of `load_state`.

    Raises:
        ConfigError: a question is empty or contains control tokens.
    """
    for state in states:
        try:
            found = storage.load_state(state, verify=verify, at_s=at_s, admit=admit)
            session = from_state(found, backbone)
            beyond = tuple(beyond_model(found))
        except StateError as error:
            yield Reply(state, 0, None, Failure.of(error))
            continue
        for number, question in enumerate(questions):
            yield Reply(state, number, session.ask(question, decoding), beyond=beyond)


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
