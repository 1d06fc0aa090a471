"""What a session passes on, and what a configuration adds to it.

A step with its positions, a batch of steps on its way through the model, a question that was forwarded; and the
interfaces of the parts: where tokens stand while they are forwarded, listeners, evidence. `protokv.extras` implements
them. Without any part a session forwards tokens at their stream positions and tells nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from protokv.core.attention import LocalKV
from protokv.core.context import Context
from protokv.core.step import StepTokens, StreamClock

if TYPE_CHECKING:
    from protokv.core.session import Session
    from protokv.extras.evidence import Evidence


@dataclass(frozen=True, slots=True)
class PositionedStep:
    """A step of the stream at its positions.

    Attributes:
        tokens: what the model reads of it.
        positions: `[T, P]` int64, stream positions.
        coordinates: `[T, 2]` float32, centres of cells.
        highest: the highest position of each component in the whole step.
        clock: where the stream stands after it.
    """

    tokens: StepTokens
    positions: Tensor
    coordinates: Tensor
    highest: tuple[int, ...]
    clock: StreamClock


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Consecutive steps on their way through the model into a memory.

    Attributes:
        steps: the steps.
        forward_positions: where their tokens are forwarded, `[T, P]`.
        context: what they attend to besides each other.
        local_kv: receives their keys and values.
    """

    steps: Sequence[PositionedStep]
    forward_positions: Tensor
    context: Context
    local_kv: LocalKV

    @property
    def tokens(self) -> list[StepTokens]:
        """The tokens of each step."""
        return [step.tokens for step in self.steps]

    @property
    def embeddings(self) -> Tensor:
        """The embeddings of all their tokens, `[T, E]`."""
        return concatenate([step.tokens.embeddings for step in self.steps])


@dataclass(frozen=True, slots=True)
class Reading:
    """A question that was forwarded.

    Attributes:
        logits: `[n, vocabulary]` float32 of its tokens.
        context: what it attended to.
        local_kv: its keys and values, after those of steps that were read again.
        next_position: position of the first token of the answer.
        prelude: stream positions `[R, P]` of the steps that were read again.
    """

    logits: Tensor
    context: Context
    local_kv: LocalKV
    next_position: int
    prelude: Tensor


class Placement:
    """Where tokens stand while they are forwarded: at their stream positions. `extras.compact` has another one."""

    def place(self, context: Context, clock: StreamClock) -> Context:
        """Return the context with its tokens where they are shown."""
        return context

    def forward_positions(self, positions: Tensor, context: Context) -> Tensor:
        """Return where tokens of the stream at `positions` `[T, P]` are forwarded with a placed context."""
        return positions

    def stream_keys(self, keys: Tensor, context: Context) -> Tensor:
        """Return keys `[L, H, T, D]` of tokens that were forwarded there, rotated to their stream positions."""
        return keys

    def text_start(self, context: Context, clock: StreamClock) -> int:
        """Return the position of the first text token behind the video."""
        return clock.next_position


class SessionListener:
    """Is told what a session does; every method may be left out."""

    def before_append(self, session: Session, step: PositionedStep) -> None:
        """Called before the memory takes a step."""

    def after_append(self, session: Session, step: PositionedStep, context: Context) -> None:
        """Called when the memory has taken a step that attended to `context`."""

    def before_read(self, session: Session) -> None:
        """Called before a question is forwarded and before the state is read."""


class EvidenceFinder(Protocol):
    """Finds the stream times that an answer stands on."""

    def record(self, context: Context) -> Context:
        """Return a context that keeps what `find` needs of the forward that reads it."""

    def find(self, session: Session, reading: Reading) -> Evidence:
        """Return the evidence of a question that was forwarded with a recorded context."""


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What a configuration adds to a session."""

    placement: Placement = field(default_factory=Placement)
    listeners: Sequence[SessionListener] = ()
    evidence: EvidenceFinder | None = None


def concatenate(parts: list[Tensor]) -> Tensor:
    """Return parts joined along the first axis; nothing is copied if there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
