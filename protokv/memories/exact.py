"""`ExactMemory`: memories of exact tokens, in the model's dtype or in 8 bits (`kv_bits=8`): a byte a number.

So that a comparison at equal bytes is one of memories, not of number formats. A token is rounded once, when it enters,
to the nearest (`quantize_vectors`), and stays as it was rounded. The prompt prefix stays exact, as in
`durable`. Slots hold D codes and after them the exponents of each group, as one row of bytes, so that windows and
kept tokens move them as they move numbers. A context decodes all of them: it takes as many bytes as tokens in the
model's dtype while it is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from protokv.core.context import Context, SlotContext
from protokv.core.memory import LocalMemory
from protokv.core.near import NearWindow, Slots
from protokv.core.rotary import Rotary
from protokv.core.sanitize import Sanitizer
from protokv.core.settings import MemoryConfig
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec
from protokv.memories.durable.quantized import dequantize_vectors, quantize_vectors, shared_features

_ROWS: Final = ("near.keys", "near.values", "kept.keys", "kept.values")

KVBits = Literal["model", 8]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensConfig(MemoryConfig):
    """A bounded memory of exact tokens.

    Attributes:
        kv_bits: bits of each number of a key or value. "model" is the model's dtype. 8 rounds each token once, when it
            enters, as `durable` rounds its centres, so that memories can be compared at equal bytes.
    """

    kv_bits: KVBits = "model"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `kv_bits` only where it is 8, as states and rows from before it have it."""
        values = super(TokensConfig, self).to_dict()
        return {name: value for name, value in values.items() if name != "kv_bits" or value == 8}


class ExactMemory(LocalMemory):
    """The prompt prefix and a ring of exact tokens; subclasses decide which tokens stay."""

    def __init__(self, config: Any, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._slots, self._near = self._allocate(self._first_capacity())

    def _first_capacity(self) -> int:
        """Return the number of tokens to allocate at first."""
        return int(self._config.near_tokens)

    def _allocate(self, capacity: int) -> tuple[Slots, NearWindow]:
        slots = new_token_slots(self._config, self._shape, far=0, near=capacity)
        return slots, NearWindow(slots, self._shape.position_components)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the prompt prefix and a window of W tokens."""
        window = declare_packed(config, NearWindow.declare(shape, config.near_tokens))
        return (*Slots.declare(shape), *Sanitizer.declare(), *window)

    def parts(self) -> Sequence[StatePart]:
        """Return the prompt prefix, the sanitizer and the window."""
        return self._slots, self._sanitizer, self._near

    def append(self, step: StepKV) -> None:
        """Take one step; the window evicts its oldest steps to make room."""
        self._near.append(enter_slots(self._slots, self._admit(step, self._near.last_step)))

    def context(self) -> Context:
        """Return all slots. Their number is constant unless the memory is unbounded."""
        return self._slots.context(self._near.positions)

    def report(self) -> dict[str, Any]:
        """Return the number of tokens held and dropped."""
        return {"near_tokens_in_use": len(self._near), "tokens_dropped": int(self._sanitizer.dropped), "layers": []}


def pack_vectors(vectors: Tensor) -> Tensor:
    """Return rows of bytes `[..., D + D / g]` int8 of vectors `[..., D]`."""
    codes, exponents = quantize_vectors(vectors.float(), shared_features(vectors.shape[-1]))
    return torch.cat((codes, exponents.view(torch.int8)), -1)


def unpack_vectors(held: Tensor, size: int) -> Tensor:
    """Return what is held of vectors of `size`, `[..., D]` float32: of rows of bytes, or of the vectors themselves."""
    return (
        dequantize_vectors(held[..., :size], held[..., size:].view(torch.uint8))
        if held.dtype == torch.int8
        else held.float()
    )


def pack_like(vectors: Tensor, held: Tensor) -> Tensor:
    """Return vectors `[..., D]` float32 in the form of what is `held`."""
    return pack_vectors(vectors) if held.dtype == torch.int8 else vectors.to(held.dtype)


def _is_packed(config: Any) -> bool:
    # Unbounded memories have no such setting.
    return getattr(config, "kv_bits", "model") == 8


def declare_packed(config: Any, specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the declaration of exact tokens under these settings, given the one in the model's dtype."""
    if not _is_packed(config):
        return tuple(specs)
    return tuple(_packed(spec) if spec.name in _ROWS else spec for spec in specs)


def _packed(spec: TensorSpec) -> TensorSpec:
    *rest, size = spec.shape
    assert size is not None
    meaning = f"{spec.meaning}, in 8 bits: codes, then the powers of two that they count"
    shape = (*rest, size + size // shared_features(size))
    return replace(spec, dims=(*spec.dims[:-1], "packed_feature"), shape=shape, dtype=torch.int8, meaning=meaning)


def new_token_slots(config: Any, shape: MemoryShape, *, far: int, near: int) -> Slots:
    """Return the slots of exact tokens under these settings."""
    return (PackedSlots if _is_packed(config) else Slots)(shape, far=far, near=near)


def enter_slots(slots: Slots, step: StepKV) -> StepKV:
    """Return a step as these slots hold it."""
    if not isinstance(slots, PackedSlots):
        return step
    return replace(step, keys=pack_vectors(step.keys), values=pack_vectors(step.values))


class PackedSlots(Slots):
    """Far and near slots in rows of bytes, and the prompt prefix as it is."""

    def __init__(self, shape: MemoryShape, *, far: int, near: int) -> None:
        size = shape.head_size + shape.head_size // shared_features(shape.head_size)
        super().__init__(replace(shape, head_size=size, sink_tokens=0, dtype=torch.int8), far=far, near=near)
        self._prefix, self._shape = Slots(shape, far=0, near=0), shape

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix."""
        self._prefix.start(keys, values)
        self.started = True

    def context(self, near: Tensor, far: Callable[[], Tensor] | None = None) -> SlotContext:
        """Return all slots, decoded."""
        prefix = self._prefix.context(near[:0])
        held = super().context(near, far)
        P0 = self._shape.sink_tokens

        def join(one: Tensor, other: Tensor) -> Tensor:
            return torch.cat((one, unpack_vectors(other, self._shape.head_size).to(one.dtype)), 2)

        def positions() -> Tensor:
            assert prefix.positions is not None
            assert held.positions is not None
            return torch.cat((prefix.positions(), held.positions()), 2)

        return SlotContext(
            join(prefix.keys, held.keys),
            join(prefix.values, held.values),
            torch.cat((prefix.bias, held.bias), 2),
            slice(held.far.start + P0, held.far.stop + P0),
            positions,
        )

    def live_tensors(self) -> dict[str, Tensor]:
        """Return the prompt prefix."""
        return self._prefix.live_tensors()

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the prompt prefix of a checked state."""
        self._prefix.take(tensors)
        self.started = True

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the bias of the prompt prefix."""
        return self._prefix.buffers()
