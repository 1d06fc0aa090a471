"""`QuantizedBank`: centres at a byte a feature (`center_bits=8`), decoded where they are read.

32 features share a power of two, and each is a whole number from -127 to 127 times it, as in MXINT8 (OCP Microscaling
Formats 1.0, 2023), which needs no fitted codebook. Attention decodes centres when it reads them: a prototype costs a
quarter of a float32 one, and nothing is held twice.

A centre that has moved is rounded again. A heavy one moves by less than half a unit at a time, so rounding to nearest
would stop it. From mass 2 on the rounding is therefore stochastic in effect: a number is rounded up as often as its
fraction says, by a sequence over mass and feature that fills the unit interval evenly (R2: Roberts, 2018). The unit is
a power of two because any other would change with the centre, and all of its numbers would be rounded again.
`samples/studies/harder/` measures what that keeps. Everything is a function of the centre and its mass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from protokv.core.arrays import add_rows_, chunks, write_rows_
from protokv.core.bank import PrototypeBank
from protokv.core.context import SlotContext
from protokv.core.rotary import Rotary, rotate
from protokv.core.tensors import LAYER, MemoryShape, TensorSpec

SHARED_FEATURES: Final = 32
"""Numbers that share a power of two, or fewer where a head is no multiple of it."""
# Prototypes of each head that are shown at once.
_ROWS: Final = 512
_MOST: Final = 127
# Powers of two by which a code is a normal, finite float32.
_EXPONENTS: Final = (-126, 121)
# In units of 2**-32: 1 / g and 1 / g**2, where g**3 = g + 1.
_BY_MASS, _BY_FEATURE = 3242174889, 2447445414


def quantize_centers(vectors: Tensor, mass: Tensor, feature: int = 0) -> tuple[Tensor, Tensor]:
    """Return codes `[n, D]` and exponents `[n, D / g]` int8 of `vectors` `[n, D]` float32 of prototypes of `mass` `[n]`
    int64.

    g is the greatest common divisor of D and 32. `feature` counts the features before the first one.
    """
    n, D = vectors.shape
    together = math.gcd(D, SHARED_FEATURES)
    parts = vectors.reshape(n, D // together, together)
    # The unit is the least power of two of which the greatest number is at most 127 times.
    fraction, exponent = torch.frexp(parts.abs().amax(2))
    exponent = (exponent - 7 + (fraction > _MOST / 128)).clamp_(min=_EXPONENTS[0])
    # All of a free slot is zero.
    exponent.masked_fill_(fraction == 0, 0)
    scaled = parts.double() * _power(-exponent)[..., None]
    codes = (scaled.flatten(1) + _rounding(mass, feature, D)).floor()
    return codes.to(torch.int8), exponent.to(torch.int8)


def dequantize_centers(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return vectors `[..., D]` float32, exactly."""
    parts = codes.reshape(*exponents.shape, codes.shape[-1] // exponents.shape[-1])
    return (parts * _power(exponents)[..., None]).flatten(-2)


def _power(exponent: Tensor) -> Tensor:
    """Return powers of two, from -126 on, in float32, made from their bits: a device may round a computed power."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def _rounding(mass: Tensor, feature: int, size: int) -> Tensor:
    """Return the numbers to add before rounding down, `[n, D]` float64 in [0, 1): a half for a token alone."""
    features = torch.arange(feature, feature + size, device=mass.device)
    sequence = (mass[:, None] * _BY_MASS + features * _BY_FEATURE) & (2**32 - 1)
    return (sequence.double() / 2**32).masked_fill_(mass[:, None] == 1, 0.5)


class QuantizedBank(PrototypeBank):
    """A bank whose centres are quantized.

    Attributes:
        key_codes, value_codes: `[L, H, K, D]` int8.
        key_exponents, value_exponents: `[L, H, K, D / g]` int8, the powers of two that they are whole numbers of.
    """

    center_names: ClassVar[tuple[str, ...]] = ("key_codes", "key_exponents", "value_codes", "value_exponents")

    key_codes: Tensor
    key_exponents: Tensor
    value_codes: Tensor
    value_exponents: Tensor

    @classmethod
    def declare_centers(cls, shape: MemoryShape, prototypes: int) -> tuple[TensorSpec, ...]:
        """Declare codes and exponents of K prototypes."""
        slot, D = (LAYER, "kv_head", "prototype"), shape.head_size
        size = (shape.layers, shape.kv_heads, prototypes)
        codes, groups = (*slot, "feature"), (*slot, "feature_group")
        meanings = {"key": "centre of its keys, rotation removed", "value": "centre of its values"}
        found = []
        for kind, meaning in meanings.items():
            unit, parts = f"powers of two that bank.{kind}_codes counts", D // math.gcd(D, SHARED_FEATURES)
            found.append(TensorSpec(f"bank.{kind}_codes", codes, (*size, D), torch.int8, f"{meaning}, in 8 bits"))
            found.append(TensorSpec(f"bank.{kind}_exponents", groups, (*size, parts), torch.int8, unit))
        return tuple(found)

    def centers(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of some prototypes."""
        return self._decoded(2, rows)

    def head_centers(self, heads: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of some heads."""
        return self._decoded(1, heads)

    def _decoded(self, last: int, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the chosen rows of the dimensions up to `last`, flattened, decoded."""
        codes, exponents, value_codes, value_exponents = (
            getattr(self, name).flatten(0, last)[chosen] for name in self.center_names
        )
        return dequantize_centers(codes, exponents), dequantize_centers(value_codes, value_exponents)

    def show(self, layer: int | slice, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what attention reads of a layer: keys rotated to their anchors, and values, `[H, K, D]`.

        Of several layers `[l, H, K, D]`.
        """
        codes, exponents, value_codes, value_exponents = (getattr(self, name)[layer] for name in self.center_names)
        anchors = self.position[layer]
        keys, values = (torch.empty(codes.shape, dtype=dtype, device=codes.device) for _ in range(2))
        for some in chunks(codes.shape[-2], _ROWS, codes.device):
            part = (..., some, slice(None))
            angles = rotary(anchors[part].round().long())
            keys[part] = rotate(dequantize_centers(codes[part], exponents[part]), *angles)
            values[part] = dequantize_centers(value_codes[part], value_exponents[part])
        return keys, values

    def put_centers_(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace centres, whose masses are written by now."""
        mass = self.mass.view(-1)[rows]
        quantized = (*quantize_centers(keys, mass), *quantize_centers(values, mass, keys.shape[1]))
        for name, new in zip(self.center_names, quantized, strict=True):
            write_rows_(getattr(self, name).flatten(0, 2), rows, new)

    def draw_centers_(self, moves: Tensor, share: Tensor) -> None:
        """Move centres; each is rounded once, where it ends."""
        target = moves[0]
        line = torch.arange(len(target), device=target.device)
        first = torch.empty_like(self.mass).view(-1)
        first.scatter_reduce_(0, target, line, "amin", include_self=False)
        # Where a target comes several times, its first row gathers all of its moves, and the others are copies of that.
        own = first.index_select(0, target)
        moved = []
        for held, other in self.centers(moves):
            add_rows_(held, own, (other - held).mul_(share))
            moved.append(held.index_select(0, own))
        self.put_centers_(target, moved[0], moved[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedContext(SlotContext):
    """`N` slots `[sink | far | near]`; `keys` and `values` lack the first `decoded` far ones.

    Attributes:
        decoded: F, far slots that are decoded.
        decode: returns keys and values `[H, F, D]`, model dtype, of the far slots of one layer.
    """

    decoded: int
    decode: Callable[[int], tuple[Tensor, Tensor]]

    def read(self, layer: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return slots of a layer; nothing is decoded unless there are decoded ones among them."""
        far = self.far
        if (part.start or 0) >= far.start + self.decoded:
            exact = slice(part.start - self.decoded, None if part.stop is None else part.stop - self.decoded)
            return self.keys[layer][:, exact], self.values[layer][:, exact]
        pairs = zip((self.keys[layer], self.values[layer]), self.decode(layer), strict=True)
        keys, values = (torch.cat((held[:, : far.start], new, held[:, far.start :]), 1)[:, part] for held, new in pairs)
        return keys, values
