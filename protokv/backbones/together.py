"""One model for several streams at a time: forwards that are asked for in several threads run as one.

Each stream has a member of the model, which shares its weights, in a thread of its own; a forward waits until every
member has asked for one or has left, and the last to come runs them all (`protokv.extras.joint`). Frames go through
the vision tower one stream at a time. What a stream computes does not depend on who is with it, up to the order of
sums.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protokv.backbones.base import Backbone
from protokv.core.attention import LocalKV
from protokv.core.context import Context, EmptyContext
from protokv.core.step import StepTokens
from protokv.extras.joint import JointKV, Stream


@dataclass(slots=True)
class _Request:
    embeddings: Tensor
    positions: Tensor
    context: Context
    local_kv: LocalKV
    steps: Sequence[StepTokens]
    hidden: Tensor | None = None
    error: BaseException | None = None


class Together:
    """Where the members of a model meet."""

    def __init__(self, backbone: Backbone, n: int) -> None:
        """Expect members. `forwards` counts what the model was asked for.

        Args:
            backbone: the model; nothing else may use it meanwhile.
            n: how many there will be; each must `leave` at its end, whatever that is.
        """
        self._backbone, self._present = backbone, n
        self._waiting: list[_Request] = []
        self._change = threading.Condition()
        self.forwards = 0
        self.seeing = threading.Lock()

    @contextmanager
    def member(self) -> Iterator[Backbone]:
        """The model for one stream, in the thread that asks; the others no longer wait for it behind the block."""
        kind = type(self._backbone)
        shared: Any = type(f"Shared{kind.__name__}", (_Member, kind), {"meeting": self})
        member: Backbone = shared.__new__(shared)
        # Its attributes are those of the model, which nothing changes.
        vars(member).update(vars(self._backbone))
        try:
            yield member
        finally:
            with self._change:
                self._present -= 1
                self._change.notify_all()

    def run(self, request: _Request) -> Tensor:
        """The hidden states of a forward, once all who are present have asked for one."""
        with self._change:
            self._waiting.append(request)
            self._change.notify_all()
            while request.hidden is None and request.error is None:
                if len(self._waiting) == self._present:
                    self._forward()
                    self._change.notify_all()
                else:
                    self._change.wait()
        if request.error is not None:
            raise request.error
        assert request.hidden is not None
        return request.hidden

    def _forward(self) -> None:
        waiting, self._waiting = self._waiting, []
        # A prompt is not a step, and a family may feed more than embeddings of a step to the layers.
        self._forward_jointly([one for one in waiting if one.steps])
        for one in waiting:
            if not one.steps:
                self._forward_jointly([one])

    def _forward_jointly(self, asked: list[_Request]) -> None:
        self.forwards += bool(asked)
        try:
            if len(asked) <= 1:
                for one in asked:
                    one.hidden = self._backbone.forward(
                        one.embeddings, one.positions, one.context, one.local_kv, steps=one.steps
                    )
                return
            joint = JointKV([Stream(len(one.embeddings), one.context, one.local_kv) for one in asked])
            hidden = self._backbone.forward(
                torch.cat([one.embeddings for one in asked]),
                torch.cat([one.positions for one in asked]),
                EmptyContext(),
                joint,
                steps=[step for one in asked for step in one.steps],
            )
            for one, part in zip(asked, torch.split(hidden, [len(one.embeddings) for one in asked]), strict=True):
                one.hidden = part
        except BaseException as error:
            for one in asked:
                one.error = error


class _Member:
    """What differs in a member from the model that it shares."""

    meeting: Together

    def forward(
        self, embeddings: Tensor, positions: Tensor, context: Context, local_kv: LocalKV, *, steps: Sequence[Any] = ()
    ) -> Tensor:
        """As `Backbone.forward`, with those of the other members."""
        return self.meeting.run(_Request(embeddings, positions, context, local_kv, steps))

    def embed_steps(self, steps: Sequence[Any], times_s: Sequence[float]) -> list[StepTokens]:
        """As `Backbone.embed_steps`, one stream at a time."""
        with self.meeting.seeing:
            return super().embed_steps(steps, times_s)  # type: ignore[misc,no-any-return]
