"""`DurableBank`: the prototypes of `durable`, in one row each, so that a step reads and writes few
tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from protokv.core.bank import PrototypeBank
from protokv.core.tensors import LAYER, MemoryShape, TensorSpec
from protokv.memories.durable.quantized import (
    count_features_per_scale,
    dequantize_vectors,
    make_dither_offsets,
    make_feature_dither,
    quantize_vectors,
    scale_codes,
)

MOST_PROTOTYPE_NUMBER: Final = 2_000_000_000
"""The greatest mass, step and position of a prototype: int32 has it, even after a mean in
float32.
"""


class DurableBank(PrototypeBank):
    """A bank of float32 centres. `mass`, `last_step` and `position`, int32, are views of `rows`."""

    # `[L * H * K, 2 + P]` int32: mass, step and position of a prototype
    rows: Tensor

    def __init__(self, shape: MemoryShape, prototypes: int) -> None:
        super().__init__(shape, prototypes)
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
    def declare(cls, shape: MemoryShape, prototypes: int) -> tuple[TensorSpec, ...]:
        """Declare a bank of K prototypes without places in the picture."""
        narrow = dict.fromkeys(("bank.mass", "bank.last_step", "bank.position"), torch.int32)
        used = (
            one
            for one in super().declare(shape, prototypes)
            if one.name not in ("bank.mean", "bank.covariance")
        )
        return tuple(replace(one, dtype=narrow.get(one.name, one.dtype)) for one in used)

    def _make_centers(self, size: tuple[int, ...], shape: MemoryShape) -> None:
        centers = torch.zeros(size, device=shape.device)
        self.key_center, self.value_center = centers.chunk(2, -1)
        self._centers = centers.flatten(0, 2)

    def live_tensors(self) -> dict[str, Tensor]:
        """Return its part of the state."""
        self._count_merged()
        return super().live_tensors()

    def report(self, step: int) -> list[dict[str, Any]]:
        """Return the report of every bank."""
        self._count_merged()
        return super().report(step)

    def _count_merged(self) -> None:
        # Every token opens a slot, and what is no longer in use was merged away.
        torch.sub(self.opened, (self.mass > 0).sum(2), out=self.merged)

    def read(self, rows: Tensor) -> Tensor:
        """Return the centres [key; value] of prototypes `rows` `[m]`, `[m, 2 D]` float32."""
        return self._centers.index_select(0, rows)

    def centers(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[n, D]` float32 of prototypes `rows` `[n]`."""
        keys, values = self.read(rows).chunk(2, -1)
        return keys, values

    def write_(self, rows: Tensor, centers: Tensor, mass: Tensor) -> Tensor:
        """Replace the centres of prototypes `rows` `[m]`, given the masses `[m]`; return them as
        they are held.
        """
        self._centers.index_copy_(0, rows, centers)
        return centers


class QuantizedBank(DurableBank):
    """A bank whose centres are quantized: whole numbers of powers of two, of which it has a
    float32's exponents.
    """

    key_codes: Tensor  # `[L, H, K, D]` int8
    key_exponents: Tensor  # `[L, H, K, D / g]` uint8
    value_codes: Tensor
    value_exponents: Tensor

    @classmethod
    def declare_centers(cls, shape: MemoryShape, prototypes: int) -> tuple[TensorSpec, ...]:
        """Declare codes and exponents of K prototypes."""
        slot = (LAYER, "kv_head", "prototype")
        D = shape.head_size
        size = (shape.layers, shape.kv_heads, prototypes)
        parts = D // count_features_per_scale(D)
        found: list[TensorSpec] = []
        for kind, of_tokens in {"key": "keys, rotation removed", "value": "values"}.items():
            codes = f"centre of its {of_tokens}, in 8 bits"
            powers = f"powers of two that bank.{kind}_codes counts, plus 127"
            found += (
                TensorSpec(f"bank.{kind}_codes", (*slot, "feature"), (*size, D), torch.int8, codes),
                TensorSpec(
                    f"bank.{kind}_exponents",
                    (*slot, "feature_group"),
                    (*size, parts),
                    torch.uint8,
                    powers,
                ),
            )
        return tuple(found)

    def _make_centers(self, size: tuple[int, ...], shape: MemoryShape) -> None:
        *slots, features = size
        self._together = count_features_per_scale(shape.head_size)
        codes = torch.zeros(size, dtype=torch.int8, device=shape.device)
        exponents = torch.zeros(
            *slots, features // self._together, dtype=torch.uint8, device=shape.device
        )
        self.key_codes, self.value_codes = codes.chunk(2, -1)
        self.key_exponents, self.value_exponents = exponents.chunk(2, -1)
        self._codes = codes.flatten(0, 2)
        self._exponents = exponents.flatten(0, 2)
        self._features = make_feature_dither(features, shape.device)

    def read(self, rows: Tensor) -> Tensor:
        """Return the centres of some prototypes, decoded."""
        return dequantize_vectors(
            self._codes.index_select(0, rows), self._exponents.index_select(0, rows)
        )

    def write_(self, rows: Tensor, centers: Tensor, mass: Tensor) -> Tensor:
        """Round centres and write them; return them as they were rounded."""
        offsets = make_dither_offsets(mass, self._features)
        codes, exponents, powers = quantize_vectors(centers, self._together, offsets)
        self._codes.index_copy_(0, rows, codes.to(torch.int8))
        self._exponents.index_copy_(0, rows, exponents)
        return scale_codes(codes, powers)
