"""`QuestionForwarder`: a question and the tokens of its answer, forwarded by graphs.

A question is filled up with tokens that nobody sees to one of a few lengths, and the answer has
room of one size, so that every question, and every token, is the same work. Where layers of another
kind than full attention would take such tokens in, it keeps its length. What the memory shows is
read once for an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
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
from protokv.device.graphs import Graphs
from protokv.device.slots import ANSWER_ROWS

_LEAST_QUESTION: Final = 32
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
        self.graphs = Graphs(backbone.device, backbone.why_eager)
        self._fills = set(backbone.layer_kinds) <= {LayerKind.FULL}
        self.cache: TokenCache | None = None
        self._backbone = backbone
        self._room = AnswerBuffer(0, backbone.device)
        # the last question whose answer may go on
        self._live: Callable[[], QuestionLogits | None] = lambda: None

    def read(
        self, session: SessionView, ids: list[int], room: int, *, differs: bool = False
    ) -> QuestionLogits | None:
        """Forward a question to what the session has seen, with `room` for an answer of so many
        tokens.

        None: it cannot be captured, since what it is to see `differs` from what the memory shows,
        or see `graphs.how`.
        """
        memory = session.memory
        why = self.graphs.why_not
        length = max(_LEAST_QUESTION, 1 << (len(ids) - 1).bit_length()) if self._fills else len(ids)
        needed = length + room
        if (
            differs
            or memory.retrieves
            or not memory.steady
            or needed > _MOST_ROOM
            or self._live() is not None
        ):
            why = (
                why
                or "it is long, reads other buffers each time, or an earlier answer has not ended"
            )
        if why:
            self.graphs.how["question"] = why
            return None
        memory.join()
        embedded = functional.pad(self._backbone.embed_text(ids), (0, 0, 0, length - len(ids)))
        told = torch.tensor([len(ids), session.clock.next_position])
        told = (told.pin_memory() if embedded.is_cuda else told).to(
            embedded.device, non_blocking=True
        )

        def hold(end: Tensor) -> Context:
            placed = CachedContext(session.placement.place(memory.recall(), end))
            for layer in range(self._backbone.layers):
                placed.at(layer, torch.empty(0))
            return placed

        context = self.graphs.run("context", (), hold, told[1], at_once=True)
        if self.graphs.how["context"] != "graph":
            return None
        if self.cache is None or self._room.capacity < needed:
            capacity = max(ANSWER_ROWS, 1 << (needed - 1).bit_length())
            self._room = AnswerBuffer(capacity, self._backbone.device, context.wide)
            self.cache = session.cache.fork(context)
            for layer in self.cache.memory_layers:
                layer.answer = self._room
        self.cache.take(session.cache)
        start = told[1] if context.next_position is None else context.next_position
        given = embedded, told[:1], start.view(1)
        form = self._room.capacity, self.cache.form
        logits = self.graphs.run("question", form, self._read, *given, at_once=self._fills)
        reading = QuestionLogits(
            logits, self.cache, None, told.new_zeros(0, self._backbone.position_components)
        )
        self._live = ref(reading)
        return reading

    def decode(self, reading: QuestionLogits, token: Tensor, index: int) -> Tensor:
        """Forward the token `[1]` int64 with this index in an answer; return logits `[vocabulary]`
        float32.
        """
        if reading.cache is self.cache:
            form = self._room.capacity, reading.cache.form
            logits: Tensor = self.graphs.run("token", form, self._decode, token)
            return logits
        assert reading.next_position is not None
        where = self._backbone.text_positions(reading.next_position + index, 1)
        hidden = self._backbone.forward(self._backbone.embed_token(token), where, reading.cache)
        return self._backbone.logits(hidden[-1])

    def _read(self, embedded: Tensor, count: Tensor, start: Tensor) -> Tensor:
        self._room.begin.zero_()
        hidden = self._forward(embedded, start)
        self._room.begin.copy_(count)
        self._room.first.copy_(start)
        return self._backbone.logits(hidden.index_select(0, count - 1))

    def _decode(self, token: Tensor) -> Tensor:
        hidden = self._forward(self._backbone.embed_token(token), self._room.first)
        self._room.begin.add_(1)
        return self._backbone.logits(hidden[-1])

    def _forward(self, embedded: Tensor, first: Tensor) -> Tensor:
        assert self.cache is not None
        self._room.enter(len(embedded))
        where = (self._room.slots + first)[:, None].expand(-1, self._backbone.position_components)
        hidden = self._backbone.forward(embedded, where, self.cache)
        self.cache.take(self.cache, len(embedded))
        return hidden
