"""What a session passes on and to whom: records, where its tokens stand, who listens, what its
state has besides.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from protokv.core.attention import TokenCache
from protokv.core.backbone import Backbone
from protokv.core.context import Context, PositionFacts
from protokv.core.memory import Memory
from protokv.core.rotary import mark_moving_components, rotate
from protokv.core.step import StepTokens, StreamClock
from protokv.core.tensors import Specs, StateTensors
from protokv.errors import PositionWarning


@dataclass(frozen=True, slots=True)
class PositionedStep:
    """A step of the stream at its positions."""

    tokens: StepTokens  # the tokens that the model reads of it
    positions: Tensor  # `[T, P]` int64, stream positions
    coordinates: Tensor  # `[T, 2]` float32, centres of cells
    highest: tuple[int, ...]  # the highest position of each component in the whole step
    clock: StreamClock  # the clock after it
    # the same after the last step with words, up to this one; None: there is none
    words_end: StreamClock | None = None


class TokenPlacement:
    """Where tokens stand while they are forwarded: at their stream positions, or at `compact`
    ones.
    """

    def __init__(self, backbone: Backbone, compact: bool, origin: int) -> None:
        """Place tokens; the stream begins at the position `origin`."""
        self._compact = compact
        self._moving = backbone.moving
        self._origin = origin
        self._limit = backbone.max_position
        if compact:
            self._rotary = backbone.precise_rotary
            self._direction = mark_moving_components(
                backbone.moving, backbone.position_components, backbone.device
            )

    def place(self, context: Context, end: int | Tensor) -> Context:
        """Return the context with its tokens where they are shown; `end` is the position after
        everything seen.
        """
        if not self._compact:
            return context
        return context.compact(PositionFacts(self._rotary, self._origin, end, self._moving))

    def forward_positions(self, positions: Tensor, context: Context) -> Tensor:
        """Return where tokens of the stream at `positions` `[T, P]` are forwarded with a placed
        context.
        """
        return positions if self._stays(context) else positions - self._direction * context.shift

    def stream_keys(self, keys: Tensor, context: Context) -> Tensor:
        """Return keys `[L, H, T, D]` of tokens that were forwarded there, rotated to their stream
        positions.
        """
        if self._stays(context):
            return keys
        return rotate(keys, self._rotary(self._direction * context.shift)).to(keys.dtype)

    def text_start(self, context: Context, clock: StreamClock) -> int:
        """Return the position of the first text token after the video."""
        moved = self._compact and context.next_position is not None
        return int(context.next_position or 0) if moved else clock.next_position

    def check_limit(self, step: PositionedStep, context: Context) -> None:
        """Warn once, with a PositionWarning, of a step that was forwarded beyond the positions that
        the model knows.

        At compact positions only the device knows how far a step stands, which the size of the
        memory bounds.
        """
        shift = context.shift
        if self._limit is None or isinstance(shift, Tensor):
            return
        position = max(
            place - shift * (component in self._moving)
            for component, place in enumerate(step.highest)
        )
        if position >= self._limit:
            trained = self._limit
            self._limit = None
            why = (
                f"step {step.clock.steps - 1} stands at position {position}, and the model was "
                f"trained on {trained}"
            )
            advice = "" if self._compact else "; positions=compact would stay inside"
            warnings.warn(why + advice, PositionWarning, stacklevel=3)

    def _stays(self, context: Context) -> bool:
        """Return True if the host knows that tokens are forwarded at their stream positions."""
        return not self._compact or (isinstance(context.shift, int) and not context.shift)


class SessionView(Protocol):
    """The attributes of a session that its listeners and its evidence read; all as the session has
    them.
    """

    backbone: Backbone
    config: Any
    memory: Memory
    cache: TokenCache
    clock: StreamClock
    placement: TokenPlacement
    sink_tokens: int
    outside: bool

    @property
    def transcript(self) -> TranscriptAttachment | None:
        """What was said so far; None: nobody keeps it."""


class SessionListener:
    """A listener of a session. A subclass overrides the methods that it needs."""

    def before_append(self, session: SessionView, step: PositionedStep) -> None:
        """Called before the memory takes a step."""

    def after_append(self, session: SessionView, step: PositionedStep, context: Context) -> None:
        """Called when the memory has taken a step that attended to `context`."""


class SessionAttachment(SessionListener, StateTensors):
    """A part of a session's state besides the memory, such as thumbnails; it listens to the
    session.
    """

    @staticmethod
    @abstractmethod
    def declare() -> Specs:
        """Declare its tensors, each optional: a state may have none of them."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """What was said from `start_s` to `end_s` of stream time, as plain text."""

    start_s: float
    end_s: float
    text: str
    step: int = 0  # the index of the step that took it


class TranscriptAttachment(SessionAttachment):
    """An attachment that keeps what was said (`protokv.words.transcript`)."""

    @abstractmethod
    def between(self, start_s: float, end_s: float) -> Sequence[Utterance]:
        """Return what was said in the steps that touch a span of stream time, in order."""

    @abstractmethod
    def breaks(self) -> Tensor | None:
        """Return position and time after each step with words, `[n, 2]` float64; None: no words."""

    @abstractmethod
    def words_end(self, clock: StreamClock) -> StreamClock | None:
        """Return where the stream of this clock stood after the last step with words; None: there
        was none.
        """
