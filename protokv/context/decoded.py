"""`DecodedContext`: slots of which the far ones are made when a layer reads them, and are held by nobody.

For memories that keep them in fewer bits: what is shown in full is one layer at a time. Knows no code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from protokv.context.slots import SlotContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedContext(SlotContext):
    """`N` slots `[sink | far | near]`, of which `keys` and `values` have no far ones.

    Attributes:
        decode: gives keys and values `[h, F, D]`, model dtype, of the far slots of one layer and some of its heads.
        heads: which of the heads these slots are of.
    """

    decode: Callable[[int, slice], tuple[Tensor, Tensor]]
    heads: slice = field(default_factory=lambda: slice(None))

    def read(self, layer: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Slots of a layer; without far ones among them nothing is decoded."""
        far = self.far
        if (part.start or 0) >= far.stop:
            exact = slice(part.start - far.stop + far.start, None)
            return self.keys[layer][:, exact], self.values[layer][:, exact]
        pairs = zip((self.keys[layer], self.values[layer]), self.decode(layer, self.heads), strict=True)
        keys, values = (torch.cat((held[:, : far.start], new, held[:, far.start :]), 1)[:, part] for held, new in pairs)
        return keys, values

    def of_heads(self, heads: slice) -> Self:
        """The same slots of some heads alone; only these are decoded."""
        return replace(super(DecodedContext, self).of_heads(heads), heads=heads)
