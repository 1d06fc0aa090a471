"""`Context`: what a memory shows to the model.

Owns the interface that attention reads, layer by layer, as `Segment`s. Knows no memory, no model and no file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from protokv.rotary import PreciseRotary

# The bias of a free slot where attention reads it. Finite, so that slots that are all free have a log-sum-exp; so low
# that no logit brings it back: its exponential is 0 beside that of any slot in use.
EMPTY = -1e30


@dataclass(frozen=True, slots=True)
class Segment:
    """Slots of one layer that queries meet alike.

    Attributes:
        keys, values: `[H, N, D]`, model dtype; finite where a slot is free.
        bias: `[H, N]` float32, added to the logits: `EMPTY` free, `0` exact token, `log n_k` pseudo-token.
        turn: cos and sin, `[D]` float32, by which a query is turned before it meets these keys; None: not at all.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    turn: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Anchoring:
    """What re-anchoring must know of the model.

    Attributes:
        rotary: its angles, such that they add up at any position.
        origin: position of the first visual token of the stream.
        end: the position behind everything that was seen, above 0.
        moving: the position components that grow with the stream. The first one is time (or the index of a token).
        near: time at which the near window begins, where a context of other layers has told; None: as this one finds.
    """

    rotary: PreciseRotary
    origin: int
    end: int
    moving: Sequence[int] = (0,)
    near: int | None = None


class Context(ABC):
    """What the layers of a model may read besides the tokens that are being forwarded.

    Attributes:
        shift: by how much the moving components of tokens forwarded after this context are less than their stream
            positions; 0 unless the context was re-anchored. A tensor `[]` where the device knows and the host does not.
        next_position: where text behind the video starts if the context was re-anchored, likewise; None: behind the
            stream.
    """

    shift: int | Tensor
    next_position: int | Tensor | None

    @abstractmethod
    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """What one layer reads.

        A retrieval memory chooses by `query` `[Hq, T, D]`, rotated, of the tokens being forwarded. Layers are asked in
        order, each once a forward.
        """

    def places(self, layer: int) -> Tensor | None:
        """Stream positions `[H, N, P]` int64 of the slots that `at` shows this layer, in that order.

        Anything where a slot is free. None: a context that does not know them, or has none.
        """
        return None

    @abstractmethod
    def without_far(self) -> Context:
        """The same with everything hidden but the prompt prefix and the exact tokens of the near window."""

    def before(self, time: int) -> Context:
        """The same without the tokens that stand at this time or behind it; prototypes of several tokens stay."""
        raise NotImplementedError

    @abstractmethod
    def visible_tokens(self) -> int:
        """Slots that attention can see, in the layer and head that sees most."""

    @abstractmethod
    def far_span(self) -> int | Tensor:
        """Distinct times among what is older than the near window, in the layer and head that has most; as `shift`."""

    @abstractmethod
    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> Context:
        """The same tokens at consecutive positions; `span` positions are set aside for what is older."""


@dataclass(frozen=True, slots=True)
class EmptyContext(Context):
    """No slots, for what is forwarded before there is a memory: the prompt prefix."""

    shift: int | Tensor = 0
    next_position: int | Tensor | None = None

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Nothing."""
        return ()

    def without_far(self) -> EmptyContext:
        """Itself."""
        return self

    def visible_tokens(self) -> int:
        """None."""
        return 0

    def far_span(self) -> int:
        """None."""
        return 0

    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> EmptyContext:
        """Itself."""
        return self
