"""`QuestionForwarder`: a question and the tokens of its answer, captured where that can be.

A question is filled up with tokens that nobody sees to one of a few lengths, and the answer has
room of one size, so that every question, and every token, is the same work. Where layers of another
kind than full attention would take such tokens in, it keeps its length. What the memory shows is
read once for an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional

from protokv.core.attention import TokenCache
from protokv.core.backbone import Backbone
from protokv.core.context import CachedContext, Context
from protokv.core.layers import LayerKind
from protokv.core.parts import SessionView
from protokv.device.answers import AnswerBuffer
from protokv.device.runs import Runs

_LEAST_QUESTION = 32
_MOST_ROOM = 4096
"""Tokens of question and answer. A longer one is forwarded as it is."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class QuestionLogits:
    """A question that was forwarded."""

    logits: Tensor  # `[n, vocabulary]` float32 of its tokens, or of the last one alone
    # what it attended to, and its tokens after those of steps that were read again
    cache: TokenCache
    # position of the first token of the answer; None: only the device needs it
    next_position: int | None
    prelude: Tensor  # stream positions `[R, P]` of the steps that were read again


class QuestionForwarder:
    """Reads the questions of one session, one after the other."""

    def __init__(self, backbone: Backbone) -> None:
        """Capture where the language model can be captured."""
        self.runs = Runs(backbone.device, backbone.why_eager)
        self._fills = set(backbone.layer_kinds) <= {LayerKind.FULL}
        self.cache: TokenCache | None = None
        self._backbone = backbone
        self._answer = AnswerBuffer(0, backbone.device)
        # the last question whose answer may go on
        self._live: Callable[[], QuestionLogits | None] = lambda: None

    def read(
        self, session: SessionView, ids: list[int], tokens: int, *, differs: bool = False
    ) -> QuestionLogits | None:
        """Forward a question to what the session has seen, with room for an answer of so many
        `tokens`.

        None: it cannot be captured, since what it is to see `differs` from what the memory shows,
        or see `runs.how`.
        """
        memory = session.memory
        why = self.runs.why_not
        length = max(_LEAST_QUESTION, 1 << (len(ids) - 1).bit_length()) if self._fills else len(ids)
        needed = length + tokens
        if (
            differs
            or memory.retrieves
            or memory.context_key is None
            or needed > _MOST_ROOM
            or self._live() is not None
        ):
            why = (
                why
                or "it is long, reads other buffers each time, or an earlier answer has not ended"
            )
        if why:
            self.runs.how["question"] = why
            return None
        embedded = functional.pad(self._backbone.embed_text(ids), (0, 0, 0, length - len(ids)))
        count, end = self.runs.stage([len(ids), session.clock.next_position], torch.int64)

        def hold(end: Tensor) -> Context:
            placed = CachedContext(session.placement.place(memory.recall(), end))
            for layer in range(self._backbone.layers):
                placed.at(layer, torch.empty(0))
            return placed

        context = self.runs.run("context", (), hold, end, at_once=True)
        if not self.runs.is_captured("context"):
            return None
        if self.cache is None or self._answer.capacity < needed:
            self._answer = AnswerBuffer(needed, self._backbone.device, context.wide)
            self.cache = session.cache.fork(context)
            for layer in self.cache.memory_layers:
                layer.answer = self._answer
        self.cache.take(session.cache)
        start = end if context.next_position is None else context.next_position
        given = embedded, count.view(1), start.view(1)
        key = self._answer.capacity, self.cache.key
        logits = self.runs.run("question", key, self._read, *given, at_once=self._fills)
        reading = QuestionLogits(
            logits, self.cache, None, count.new_zeros(0, self._backbone.position_components)
        )
        self._live = ref(reading)
        return reading

    def decode(self, reading: QuestionLogits, token: Tensor, index: int) -> Tensor:
        """Forward the token `[1]` int64 with this index in an answer; return logits `[vocabulary]`
        float32.
        """
        if reading.cache is self.cache:
            key = self._answer.capacity, reading.cache.key
            logits: Tensor = self.runs.run("token", key, self._decode, token)
            return logits
        assert reading.next_position is not None
        where = self._backbone.text_positions(reading.next_position + index, 1)
        hidden = self._backbone.forward(self._backbone.embed_token(token), where, reading.cache)
        return self._backbone.logits(hidden[-1])

    def _read(self, embedded: Tensor, count: Tensor, start: Tensor) -> Tensor:
        self._answer.begin.zero_()
        hidden = self._forward(embedded, start)
        self._answer.begin.copy_(count)
        self._answer.first.copy_(start)
        return self._backbone.logits(hidden.index_select(0, count - 1))

    def _decode(self, token: Tensor) -> Tensor:
        hidden = self._forward(self._backbone.embed_token(token), self._answer.first)
        self._answer.begin.add_(1)
        return self._backbone.logits(hidden[-1])

    def _forward(self, embedded: Tensor, first: Tensor) -> Tensor:
        assert self.cache is not None
        self._answer.enter(len(embedded))
        where = (self._answer.slots + first)[:, None].expand(-1, self._backbone.position_components)
        hidden = self._backbone.forward(embedded, where, self.cache)
        self.cache.take(self.cache, len(embedded))
        return hidden
