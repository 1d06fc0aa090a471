"""`DurableBank`: the prototypes of `durable`, in one row each, so that a step reads and writes few
tensors. `QuantizedBank` rounds their centres to 8 bits, and holds each number once.

| of a prototype | `DurableBank` | `QuantizedBank` |
|---|---|---|
| mass, step, position | `rows`, int32 | `rows`, int32 |
| key of the centre | `_centers`, float32 | `key_codes` times powers of two in `key_exponents` |
| value of the centre | `_centers`, float32 | in the far slots alone, decoded |

Rounding to 8 bits adds a dither first, an offset by feature and mass, so that the errors of one
merge after the other do not add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from protokv.core.bank import PrototypeBank
from protokv.core.slots import KVSlots
from protokv.core.tensors import MemoryShape, Specs, TensorDict, Tensors, TensorSpec, count_bytes
from protokv.device.arrays import slice_rows, write_rows_
from protokv.memories.durable.quantized import (
    count_features_per_scale,
    dequantize_vectors,
    make_dither_offsets,
    make_feature_dither,
    quantize_vectors,
    scale_codes,
)
from protokv.texts import JsonObject

MOST_PROTOTYPE_NUMBER = 2_000_000_000
"""The greatest mass, step and position of a prototype: int32 has it, even after a mean in
float32.
"""
_ROWS_AT_ONCE = 2**16  # prototypes that are decoded at once to save or to take a state


class DurableBank(PrototypeBank):
    """A bank of float32 centres. `mass`, `last_step` and `position`, int32, are views of `rows`."""

    # `[L * H * K, 2 + P]` int32: mass, step and position of a prototype
    rows: Tensor

    def __init__(self, shape: MemoryShape, prototypes: int, slots: KVSlots | None = None) -> None:
        super().__init__(shape, prototypes, slots)
        size = self.mass.shape
        P = shape.position_components
        D = shape.head_size
        rows = torch.zeros(*size, 2 + P, dtype=torch.int32, device=shape.device)
        rows[..., 1] = -1
        self.mass = rows[..., 0]
        self.last_step = rows[..., 1]
        self.position = rows[..., 2:]
        self.rows = rows.flatten(0, 2)
        self._make_centers((*size, 2 * D), shape)

    @classmethod
    def declare(cls, shape: MemoryShape, prototypes: int) -> Specs:
        """Declare a bank of K prototypes, whose numbers are narrow."""
        narrow = dict.fromkeys(("bank.mass", "bank.last_step", "bank.position"), torch.int32)
        return tuple(
            replace(one, dtype=narrow.get(one.name, one.dtype))
            for one in super().declare(shape, prototypes)
        )

    def _make_centers(self, size: tuple[int, ...], shape: MemoryShape) -> None:
        centers = torch.zeros(size, device=shape.device)
        self.key_center, self.value_center = centers.chunk(2, -1)
        self._centers = centers.flatten(0, 2)

    def live_tensors(self) -> TensorDict:
        """Return its part of the state."""
        self._count_merged()
        return super().live_tensors()

    def report(self, step: int) -> list[JsonObject]:
        """Return the report of every bank."""
        self._count_merged()
        return super().report(step)

    def _count_merged(self) -> None:
        # Every token opens a slot, and what is no longer in use was merged away.
        torch.sub(self.opened, (self.mass > 0).sum(2), out=self.merged)

    def read(self, rows: Tensor) -> Tensor:
        """Return the centres [key; value] of prototypes `rows` `[m]`, `[m, 2 D]` float32."""
        return self._centers.index_select(0, rows)

    def centers(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of prototypes `rows`."""
        return self.read(rows).chunk(2, -1)

    def write_(self, rows: Tensor, centers: Tensor, mass: Tensor) -> tuple[Tensor, ...]:
        """Replace the centres of prototypes `rows` `[m]`, given the masses `[m]`; return them as
        they are held, `[m, 2 D]`, and what `centers` returns.
        """
        self._centers.index_copy_(0, rows, centers)
        return centers, *centers.chunk(2, -1)


class QuantizedBank(DurableBank):
    """A bank whose centres are whole numbers of powers of two (`quantized`).

    It holds the codes of keys. Values are held decoded alone, in the slots that attention reads:
    they are not rotated, and a code times a power of two is exact in the dtype of a model. A state
    has their codes, which are read off the slots.
    """

    key_codes: Tensor  # `[L, H, K, D]` int8
    key_exponents: Tensor  # `[L, H, K, D / g]` uint8, powers of two plus 127

    def __init__(self, shape: MemoryShape, prototypes: int, slots: KVSlots | None = None) -> None:
        """Make a bank of free prototypes, whose values are those of the far `slots`."""
        super().__init__(shape, prototypes, slots)
        assert slots is not None
        self._slots = slots
        self._values = slots.rows_from(slots.far.start)[1]
        self._found_rows: Tensor | None = None
        self._found_slots = self.opened

    @classmethod
    def declare_centers(cls, shape: MemoryShape, prototypes: int) -> Specs:
        """Declare codes and exponents of K prototypes."""
        D = shape.head_size
        parts = D // count_features_per_scale(D)
        declare = shape.axes(prototype=prototypes, feature_group=parts).declare
        slot = "layer kv_head prototype"
        found: list[TensorSpec] = []
        for kind, of_tokens in {"key": "keys, rotation removed", "value": "values"}.items():
            codes = f"centre of its {of_tokens}, in 8 bits"
            powers = f"powers of two that bank.{kind}_codes counts, plus 127"
            found += (
                declare(f"bank.{kind}_codes", f"{slot} feature", torch.int8, codes),
                declare(f"bank.{kind}_exponents", f"{slot} feature_group", torch.uint8, powers),
            )
        return tuple(found)

    def _make_centers(self, size: tuple[int, ...], shape: MemoryShape) -> None:
        """Make room for the codes of keys, and give back what the base class made for values by the
        declaration: a state has their codes, the bank has not.
        """
        *slots, features = size
        D = shape.head_size
        self._together = count_features_per_scale(D)
        self.key_codes = torch.zeros(*slots, D, dtype=torch.int8, device=shape.device)
        self.key_exponents = torch.zeros(
            *slots, D // self._together, dtype=torch.uint8, device=shape.device
        )
        self._codes = self.key_codes.flatten(0, 2)
        self._exponents = self.key_exponents.flatten(0, 2)
        self._features = make_feature_dither(features, shape.device)
        for name in ("value_codes", "value_exponents"):
            delattr(self, name)
        self._names = [name for name in self._names if not name.startswith("value_")]

    def read(self, rows: Tensor) -> Tensor:
        """Return the centres of some prototypes, decoded."""
        values = self._values.index_select(0, self._find_slots(rows))
        # Both are float32 there.
        return torch.cat((self.centers(rows)[0], values), 1)

    def centers(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the keys of prototypes `rows`, decoded."""
        codes = self._codes.index_select(0, rows)
        return (dequantize_vectors(codes, self._exponents.index_select(0, rows)),)

    def _find_slots(self, rows: Tensor) -> Tensor:
        # The rows that a step reads are the same tensor that it writes afterwards.
        if rows is not self._found_rows:
            self._found_rows = rows
            self._found_slots = self._slots.find_rows(rows, self.mass.shape[2])
        return self._found_slots

    def write_(self, rows: Tensor, centers: Tensor, mass: Tensor) -> tuple[Tensor, ...]:
        """Round centres and write them; return them as they were rounded, and their keys."""
        offsets = make_dither_offsets(mass, self._features)
        codes, exponents, powers = quantize_vectors(centers, self._together, offsets)
        D = self._codes.shape[1]
        write_rows_(self._codes, rows, codes[:, :D].to(torch.int8))
        self._exponents.index_copy_(0, rows, exponents[:, : self._exponents.shape[1]])
        rounded = scale_codes(codes, powers)
        self._write_values(rows, rounded[:, D:])
        return rounded, rounded[:, :D]

    def _write_values(self, rows: Tensor, values: Tensor) -> None:
        """Write decoded values, and change them to those that the slots hold."""
        new = values.to(self._values.dtype)
        if new.dtype == torch.float16:
            # Its range is that of no other dtype: what is outside is rounded once more.
            limit = torch.finfo(new.dtype).max
            new.clamp_(-limit, limit)
            values.copy_(new)
        write_rows_(self._values, self._find_slots(rows), new)

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield parts of all prototypes, and their rows."""
        line = torch.arange(len(self.rows), device=self.rows.device)
        for some in slice_rows(len(line), _ROWS_AT_ONCE):
            yield some, line[some]

    def nbytes(self) -> dict[str, int]:
        """Return its bytes; those of values are counted with the slots."""
        return {"bank": count_bytes(*super().live_tensors().values())}

    def live_tensors(self) -> TensorDict:
        """Return its part of the state; codes of values are made for it."""
        found = super().live_tensors()
        codes = torch.empty_like(self.key_codes)
        exponents = torch.empty_like(self.key_exponents)
        half = torch.tensor(0.5, device=codes.device)
        for some, rows in self._parts():
            values = self._values.index_select(0, self._find_slots(rows)).float()
            # A number that was rounded once stays as it is.
            new, powers, _ = quantize_vectors(values, self._together, half.expand_as(values))
            codes.view(-1, values.shape[1])[some] = new.to(torch.int8)
            exponents.view(-1, powers.shape[1])[some] = powers
        return found | {"bank.value_codes": codes, "bank.value_exponents": exponents}

    def take(self, tensors: Tensors) -> None:
        """Take a checked state."""
        for name, held in super().live_tensors().items():
            held.copy_(tensors[name])
        codes = tensors["bank.value_codes"].flatten(0, 2)
        exponents = tensors["bank.value_exponents"].flatten(0, 2)
        for some, rows in self._parts():
            values = dequantize_vectors(codes[some], exponents[some])
            self._write_values(rows, values.to(rows.device))
