"""`DecodedContext`: slots whose far keys and values are held in fewer bits and decoded when a layer reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from protokv.core.context import SlotContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedContext(SlotContext):
    """`N` slots `[sink | far | near]`; `keys` and `values` lack the first `decoded` far ones.

    Attributes:
        decoded: F, far slots that are decoded.
        decode: returns keys and values `[h, F, D]`, model dtype, of the far slots of one layer and some of its heads.
        heads: the heads of these slots.
    """

    decoded: int
    decode: Callable[[int, slice], tuple[Tensor, Tensor]]
    heads: slice = field(default_factory=lambda: slice(None))

    def read(self, layer: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return slots of a layer; nothing is decoded unless there are decoded ones among them."""
        far = self.far
        if (part.start or 0) >= far.start + self.decoded:
            exact = slice(part.start - self.decoded, None if part.stop is None else part.stop - self.decoded)
            return self.keys[layer][:, exact], self.values[layer][:, exact]
        pairs = zip((self.keys[layer], self.values[layer]), self.decode(layer, self.heads), strict=True)
        keys, values = (torch.cat((held[:, : far.start], new, held[:, far.start :]), 1)[:, part] for held, new in pairs)
        return keys, values

    def of_heads(self, heads: slice) -> Self:
        """Return the slots of some heads; only these are decoded."""
        return replace(super(DecodedContext, self).of_heads(heads), heads=heads)
