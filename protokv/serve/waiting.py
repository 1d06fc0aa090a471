"""Questions that wait for the model: they are answered together, and new ones join them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from protokv.serve.chat import ChatRequest
from protokv.stream.answer import Answer
from protokv.stream.together import MOST_TOGETHER, AskedQuestion, answer_together


@dataclass(frozen=True, slots=True)
class WaitingQuestion:
    """A question that waits."""

    asked: ChatRequest
    place: Path | bytes  # a state, or the key of a conversation
    send: Callable[[str], None]  # takes the pieces of the answer
    is_given_up: Callable[[], bool]
    work: Future[Answer | None]  # None: it is given up

    @property
    def watches(self) -> bool:
        """Whether pictures may come with it, so that a session takes a step."""
        return isinstance(self.place, bytes) or bool(self.asked.messages[-1].files)


class WaitingQuestions:
    """The questions that wait. Any thread may add one, and call `answer` for each."""

    def __init__(self, begin: Callable[[WaitingQuestion], AskedQuestion]) -> None:
        self._begin = begin
        self._next = deque[WaitingQuestion]()
        self.others = 0  # other work that waits for the model

    def add(self, one: WaitingQuestion) -> None:
        """Take a question."""
        self._next.append(one)

    def answer(self) -> None:
        """Answer what waits, if another call has not, and what comes meanwhile; other work waits no
        longer than for the answers that have begun.
        """
        live = dict[AskedQuestion, WaitingQuestion]()
        calls = count()
        try:
            for asked, item in answer_together(lambda: self._join(live, later=next(calls) > 0)):
                if asked not in live:
                    continue
                if isinstance(item, str):
                    live[asked].send(item)
                elif isinstance(item, Answer):
                    live.pop(asked).work.set_result(item)
                else:
                    live.pop(asked).work.set_exception(item)
        except BaseException as error:
            for one in live.values():
                one.work.set_exception(error)
        for one in live.values():
            if not one.work.done():
                one.work.set_result(None)

    def _join(
        self, live: dict[AskedQuestion, WaitingQuestion], *, later: bool
    ) -> Iterator[AskedQuestion]:
        for gone in [one for one in live if one.is_given_up()]:
            live.pop(gone).work.set_result(None)
        while len(live) < MOST_TOGETHER and self._next:
            if (later and self.others) or (live and self._next[0].watches):
                return
            try:
                one = self._next.popleft()
            except IndexError:  # another thread has it
                return
            if not one.work.set_running_or_notify_cancel():
                continue
            try:
                asked = self._begin(one)
            except BaseException as error:
                one.work.set_exception(error)
                continue
            live[asked] = one
            yield asked
            if not asked.session.joins:
                return
