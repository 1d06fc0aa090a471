"""Questions to sessions of one model, answered together: one forward for the tokens of all.

Everything in a decoder but attention works on each token by itself. So the tokens of some questions
stand one after the other, each at its own position. Attention splits them: each token reads the
context of its session, and the tokens of its own question. A question that is answered leaves, and
nobody waits for it. Answers are those one by one, up to the order of sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, islice
from typing import Any

import torch
from torch import Tensor

from protokv.core.attention import ContextReaders, TokenCache
from protokv.core.backbone import Backbone
from protokv.core.context import CachedContext, Context
from protokv.core.decoding import Decoding
from protokv.stream.answer import Answer
from protokv.stream.asking import AskedStream
from protokv.stream.joining import join_forward
from protokv.stream.reading import QuestionLogits

MOST_TOGETHER = 8
"""Questions in one forward: each token is compared with those of all other questions, too."""


@dataclass(frozen=True, slots=True, eq=False)
class AskedQuestion:
    """A question to a session, and how it is asked: what `AskedStream.stream` takes."""

    session: AskedStream
    question: str
    decoding: Decoding | None = None
    how: Mapping[str, Any] = field(default_factory=dict)
    is_given_up: Callable[[], bool] = bool  # nobody waits for its answer any more


Said = tuple[AskedQuestion, str | Answer | Exception]
"""A question, and a piece of its answer, the whole answer, or why there is none."""


class _Reader:
    """A question that is being answered."""

    wanted: Any = None  # ids or tokens to forward next; None: it is answered
    context: Context
    position: int  # of what it wants

    def __init__(self, asked: AskedQuestion, number: int, *, alone: bool) -> None:
        self.asked = asked
        self.number = number
        session = asked.session
        answer: Any = session.stream if alone else session.begin_answer
        self._pieces = answer(asked.question, asked.decoding, **asked.how)

    def go_on(self, sent: Any = None) -> Iterator[Said]:
        """Send what was forwarded; yield what comes of it, until more is wanted."""
        self.wanted = None
        try:
            while not self.asked.is_given_up():
                item = self._pieces.send(sent)
                sent = None
                if not isinstance(item, str):
                    self.wanted = item
                    return
                yield self.asked, item
        except StopIteration as end:
            yield self.asked, end.value
        # A question that cannot be answered leaves the others alone.
        except Exception as error:
            yield self.asked, error


def answer_together(join: Callable[[], Iterable[AskedQuestion]]) -> Iterator[Said]:
    """Yield what comes of each question.

    `join` is called before each forward, and returns the questions that come in. Sessions whose
    questions do not join others (`AskedStream.joins`) answer one after the other. No session takes
    a step meanwhile.
    """
    batches = dict[Backbone, _Batch]()
    live = list[_Reader]()
    numbers = count()
    while (new := list(join())) or live:
        only = len(live) + len(new) == 1
        for asked in new:
            session = asked.session
            alone = not session.joins or (only and session.captures)
            live.append(_Reader(asked, next(numbers), alone=alone))
            yield from live[-1].go_on()
        live = [one for one in live if one.wanted is not None and not one.asked.is_given_up()]
        # Questions of one session stand together.
        live.sort(key=lambda one: (id(one.asked.session.backbone), id(one.asked.session)))
        for model, group in groupby(live, lambda one: one.asked.session.backbone):
            some = list(group)
            if model not in batches:
                batches[model] = _Batch(model)
            for one, sent in zip(some, batches[model].forward(some), strict=True):
                yield from one.go_on(sent)


def stream_together(
    asked: Sequence[AskedQuestion], most: int = MOST_TOGETHER
) -> Iterator[str | Answer]:
    """Yield pieces and answer of each question, in the order of the questions; at most so many are
    answered together. Raises as `AskedStream.stream`.
    """
    left = deque(asked)
    ahead = {one: list[str | Answer]() for one in asked}
    begun = iter(asked)
    live = 0

    def join() -> list[AskedQuestion]:
        nonlocal live
        some = list(islice(begun, most - live))
        live += len(some)
        return some

    for one, item in answer_together(join):
        if isinstance(item, Exception):
            raise item
        live -= isinstance(item, Answer)
        ahead[one].append(item)
        while left and (said := ahead[left[0]]):
            yield from said
            if not isinstance(said[-1], Answer):
                said.clear()
                break
            left.popleft()


def ask_together(asked: Sequence[AskedQuestion], most: int = MOST_TOGETHER) -> Iterator[Answer]:
    """Yield the answers alone."""
    return (one for one in stream_together(asked, most) if isinstance(one, Answer))


class _Batch:
    """The layers of a model while it forwards the tokens of some questions."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._cache = backbone.new_cache()
        self._owners = list[int]()  # whose each of its tokens is
        # the context of the questions of a session, and the place where they begin
        self._shown = dict[AskedStream, tuple[Context, int]]()

    @torch.inference_mode()
    def forward(self, some: Sequence[_Reader]) -> list[Any]:
        """Return what each of some questions waits for; questions of one session stand together."""
        backbone = self._backbone
        cache = self._cache
        self._forget_others({one.number for one in some})
        new = [one for one in some if isinstance(one.wanted, list)]
        for one in new:
            self._place(one)
        sizes = [len(one.wanted) for one in some]
        first = len(self._owners)
        self._owners += [one.number for one in some for _ in one.wanted]
        cache.readers = self._find_readers(some)
        records = any(one.asked.how.get(name) for one in new for name in ("evidence", "promise"))
        cache.queries = [] if records else None
        lines = [backbone.text_positions(one.position, len(one.wanted)) for one in some]
        embedded = backbone.embed_token(torch.cat([one.wanted for one in some]))
        # Batches of next tokens come again and again; questions differ in size.
        name = "questions together" if new else "tokens together"
        key = None if new else ()
        given = embedded, torch.cat(lines)
        hidden = join_forward(backbone, name, key, cache, self._run_model, given)
        logits = backbone.logits(torch.stack([part[-1] for part in torch.split(hidden, sizes)]))
        found: list[Any] = [*logits]
        for index, one in enumerate(some):
            one.position += sizes[index]
            rows = range(first, first := first + sizes[index])
            if one in new:
                own = self._copy_rows(one.context, rows)
                scores = logits[index : index + 1]
                found[index] = QuestionLogits(scores, own, one.position, lines[0][:0])
        return found

    def _run_model(self, cache: TokenCache, given: Sequence[Tensor]) -> Tensor:
        embedded, positions = given
        return self._backbone.forward(embedded, positions, cache)

    def _forget_others(self, live: set[int]) -> None:
        """Forget the tokens of questions that are answered, if they are more than half."""
        kept = [row for row, owner in enumerate(self._owners) if owner in live]
        if 2 * len(kept) < len(self._owners):
            for layer in self._cache.memory_layers:
                layer.keep(kept)
            self._owners = [self._owners[row] for row in kept]

    def _place(self, one: _Reader) -> None:
        """Give a new question its tokens, what it attends to, and where it stands. Questions of one
        session attend to one context, unless its memory retrieves for each.
        """
        session = one.asked.session
        known = self._shown.get(session)
        ids, context, one.position = session.aim(one.wanted, shown=known)
        one.context = context if known else CachedContext(context)
        one.wanted = torch.tensor(ids, device=self._backbone.device)
        if not session.memory.retrieves:
            self._shown[session] = one.context, one.position

    def _find_readers(self, some: Sequence[_Reader]) -> list[ContextReaders]:
        """Return who reads which context, when their tokens are the last ones."""
        seen = None
        first = 0
        if len(set(self._owners)) > 1:
            owners = torch.tensor(self._owners, device=self._backbone.device)
            before = len(owners) - sum(len(one.wanted) for one in some)
            seen = (owners == owners[before:, None]).tril_(before)
        found = []
        for context, group in groupby(some, lambda one: one.context):
            tokens = slice(first, first := first + sum(len(one.wanted) for one in group))
            found.append(ContextReaders(context, tokens, None if seen is None else seen[tokens]))
        return found

    def _copy_rows(self, context: Context, rows: range) -> TokenCache:
        """Return what is read of a question that was just forwarded into these rows: what it
        attended to; if queries were recorded, also these, and its keys.
        """
        queries = self._cache.queries
        own = self._cache.fork() if queries else TokenCache(0)
        own.context = context
        if queries is not None:
            last = rows.start - len(self._owners), rows.stop - len(self._owners) or None
            own.queries = [query[:, slice(*last)] for query in queries]
            for layer in own.memory_layers:
                layer.keep(rows)
        return own
