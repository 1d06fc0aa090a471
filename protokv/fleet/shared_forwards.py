"""One model for several streams at a time: forwards that several threads ask for run as one.

Each stream runs in its own thread with a member of the model, which shares the model's weights. A forward waits until
every member has asked for one or has left; then the last thread runs all of them (`protokv.fleet.joint`). Frames go
through the vision tower one stream at a time. The results of a stream do not depend on the other streams, up to the
order of sums.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protokv.core.attention import LocalKV
from protokv.core.backbone import Backbone
from protokv.core.context import Context, EmptyContext
from protokv.core.step import StepTokens
from protokv.fleet.joint import JointKV, Stream


@dataclass(slots=True)
class _Request:
    """One forward of one member; `hidden` or `error` is set when it has run."""

    embeddings: Tensor
    positions: Tensor
    context: Context
    local_kv: LocalKV
    steps: Sequence[StepTokens]
    hidden: Tensor | None = None
    error: BaseException | None = None


class SharedForwards:
    """Collects the forwards of the members of one model and runs them together.

    Attributes:
        forwards: the number of forwards of the model so far.
        vision_lock: held while a member runs the vision tower.
    """

    def __init__(self, backbone: Backbone, members: int) -> None:
        """Expect `members` calls of `member`. Nothing else may use `backbone` meanwhile."""
        self._backbone, self._present = backbone, members
        self._waiting: list[_Request] = []
        self._change = threading.Condition()
        self.forwards = 0
        self.vision_lock = threading.Lock()

    @contextmanager
    def member(self) -> Iterator[Backbone]:
        """Yield the model for one stream in the calling thread; after the block, the others no longer wait for it."""
        kind = type(self._backbone)
        member_kind: Any = type(f"Shared{kind.__name__}", (_Member, kind), {"shared": self})
        member: Backbone = member_kind.__new__(member_kind)
        # A member has the attributes of the model, which nothing changes.
        vars(member).update(vars(self._backbone))
        try:
            yield member
        finally:
            with self._change:
                self._present -= 1
                self._change.notify_all()

    def run(self, request: _Request) -> Tensor:
        """Return the hidden states of a forward, once every present member has asked for one."""
        with self._change:
            self._waiting.append(request)
            self._change.notify_all()
            while request.hidden is None and request.error is None:
                if len(self._waiting) == self._present:
                    self._run_waiting()
                    self._change.notify_all()
                else:
                    self._change.wait()
        if request.error is not None:
            raise request.error
        assert request.hidden is not None
        return request.hidden

    def _run_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        # Prompts run alone: a family may feed more than embeddings of a step to the layers.
        self._run_jointly([request for request in waiting if request.steps])
        for request in waiting:
            if not request.steps:
                self._run_jointly([request])

    def _run_jointly(self, requests: list[_Request]) -> None:
        if not requests:
            return
        self.forwards += 1
        try:
            if len(requests) == 1:
                (one,) = requests
                one.hidden = self._backbone.forward(
                    one.embeddings, one.positions, one.context, one.local_kv, steps=one.steps
                )
                return
            counts = [len(one.embeddings) for one in requests]
            joint = JointKV([Stream(n, one.context, one.local_kv) for n, one in zip(counts, requests, strict=True)])
            hidden = self._backbone.forward(
                torch.cat([one.embeddings for one in requests]),
                torch.cat([one.positions for one in requests]),
                EmptyContext(),
                joint,
                steps=[step for one in requests for step in one.steps],
            )
            for one, part in zip(requests, torch.split(hidden, counts), strict=True):
                one.hidden = part
        except BaseException as error:
            for one in requests:
                one.error = error


class _Member:
    """The methods in which a member differs from the model that it shares."""

    shared: SharedForwards

    def forward(
        self, embeddings: Tensor, positions: Tensor, context: Context, local_kv: LocalKV, *, steps: Sequence[Any] = ()
    ) -> Tensor:
        """Run `Backbone.forward` together with the other members."""
        return self.shared.run(_Request(embeddings, positions, context, local_kv, steps))

    def embed_steps(self, steps: Sequence[Any], times_s: Sequence[float]) -> list[StepTokens]:
        """Run `Backbone.embed_steps`, one stream at a time."""
        with self.shared.vision_lock:
            return super().embed_steps(steps, times_s)  # type: ignore[misc,no-any-return]
