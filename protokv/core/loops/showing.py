"""Pseudo-tokens written where attention reads them, one after the other: centre plus residual, turned, rounded once.

Knows nothing of which prototypes are shown and where.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protokv.core.loops.compiling import compiled

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]

# As which whole numbers slots are written, and by how many bits they are shorter than float32; there is no float16 in
# numba.
BITS = {torch.float32: (torch.uint32, 0), torch.bfloat16: (torch.uint16, 16)}


def write_pseudo_tokens_(
    slots: Tensor,
    places: Tensor,
    shown: Tensor | None,
    center: Tensor,
    words: Tensor,
    modes: Tensor,
    turn: tuple[Tensor, Tensor] | None,
) -> None:
    """As `pseudo_tokens.write_pseudo_tokens_`, into `slots` of float32 or bfloat16."""
    bits, shorter = BITS[slots.dtype]
    cos, sin = (center, center) if turn is None else turn
    many = torch.full_like(places[:, 0], places.shape[1]) if shown is None else shown.sum(1)
    given = (part.contiguous().numpy() for part in (places, many, center, words, modes, cos, sin))
    _write_(slots.view(bits).numpy(), np.uint32(shorter), turn is not None, *given)


@compiled
def _write_(
    slots: NDArray[Any],
    shorter: np.uint32,
    turned: bool,
    places: Whole,
    many: Whole,
    center: Floats,
    words: Floats,
    modes: Whole,
    cos: Floats,
    sin: Floats,
) -> None:
    D, d, half = center.shape[1], words.shape[1], center.shape[1] // 2
    plain, made = np.empty(D, np.float32), np.empty(D, np.float32)
    bits = made.view(np.uint32)
    # Half of the last bit rounds to even. Of float32 nothing is cut off.
    cut = np.uint32(shorter > 0)
    for row in range(len(many)):
        for s in range(many[row]):
            for g in range(modes.shape[2]):
                word = modes[row, s, g]
                for i in range(d):
                    plain[g * d + i] = center[row, g * d + i] + words[word, i]
            if turned:
                for i in range(half):
                    made[i] = plain[i] * cos[row, i] - plain[half + i] * sin[row, i]
                for i in range(half):
                    made[half + i] = plain[half + i] * cos[row, half + i] + plain[i] * sin[row, half + i]
            else:
                for i in range(D):
                    made[i] = plain[i]
            place = places[row, s]
            for i in range(D):
                up = cut * (np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1)))
                slots[place, i] = (bits[i] + up) >> shorter
