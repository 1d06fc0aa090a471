"""Questions that wait for the model are answered together, and other work gets its turn."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.memories import MemoryConfig
from protokv.serve.waiting import WaitingQuestion, WaitingQuestions
from protokv.stream.answer import Answer
from protokv.stream.session import Session
from protokv.stream.together import AskedQuestion
from tests.conftest import watched

QUESTION = "what is the first star ?"
SHORT = Decoding(max_new_tokens=4)


@pytest.fixture(scope="module")
def session(tiny: Backbone) -> Session:
    return watched(tiny, MemoryConfig.of("durable", budget=41), range(5))


class Waiting:
    """Questions to a session, and the tokens of each forward."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.questions = WaitingQuestions(
            lambda one: AskedQuestion(session, one.asked.text, SHORT, {}, one.is_given_up)
        )
        self.sizes = list[int]()
        forward = session.backbone.forward

        def counted(embeddings: Tensor, *rest: Any, **named: Any) -> Tensor:
            self.sizes.append(len(embeddings))
            return forward(embeddings, *rest, **named)

        monkeypatch.setattr(session.backbone, "forward", counted)
        monkeypatch.setattr(session.backbone, "stop_ids", frozenset())
        monkeypatch.setattr(session.backbone, "decode", lambda ids: "x" * len(ids))

    def add(
        self, send: Any = lambda _: None, text: str = QUESTION, **how: Any
    ) -> Future[Answer | None]:
        asked: Any = SimpleNamespace(text=text, messages=[SimpleNamespace(files=())])
        place: Any = how.pop("place", None)
        work = Future[Answer | None]()
        self.questions.add(WaitingQuestion(asked, place, send, how.pop("gone", bool), work))
        return work


@pytest.fixture
def waiting(session: Session, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(session, monkeypatch)


def texts(*works: Future[Answer | None]) -> list[str]:
    return [work.result(0).text for work in works]  # type: ignore[union-attr]


def test_what_waits_is_answered_by_one_call(waiting: Waiting, session: Session) -> None:
    works = [waiting.add() for _ in range(3)]
    refused = waiting.add(text=" ")
    left = waiting.add(gone=lambda: True)
    waiting.questions.answer()
    n = len(session.backbone.question_ids(QUESTION)[0])
    assert waiting.sizes == [3 * n, 3, 3, 3]
    assert texts(*works) == [session.ask(QUESTION, SHORT).text] * 3
    assert refused.exception(0) is not None
    assert left.result(0) is None
    waiting.sizes.clear()
    waiting.questions.answer()
    assert waiting.sizes == []


@pytest.mark.parametrize(("others", "place"), [(1, None), (0, b"a conversation")])
def test_a_question_joins_unless_other_work_waits_or_pictures_come_with_it(
    waiting: Waiting, session: Session, others: int, place: bytes | None
) -> None:
    later = list[Future[Answer | None]]()

    def send(_: str) -> None:
        if not later:
            later.append(waiting.add(place=place))
            waiting.questions.others = others

    first = waiting.add(send)
    waiting.questions.answer()
    alone = [len(session.backbone.question_ids(QUESTION)[0]), 1, 1, 1]
    assert waiting.sizes == alone * (1 if others else 2)
    assert later[0].done() != bool(others)
    waiting.questions.others = 0
    waiting.questions.answer()
    assert texts(later[0]) == texts(first)
    joined = list[Future[Answer | None]]()
    waiting.add(lambda _: None if joined else joined.append(waiting.add()))
    waiting.questions.answer()
    assert texts(joined[0]) == texts(first)
