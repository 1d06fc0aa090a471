"""Writes pseudo-tokens where attention reads them: centre plus residual, turned to its position, rounded once.

Knows nothing of which prototypes are shown and where.
"""

from __future__ import annotations

from torch import Tensor

from protokv.memory.rows import write_rows_
from protokv.parts import cut
from protokv.rotary import rotate

# Numbers of pseudo-tokens, keys or values, that stay in the cache of a CPU until they are written.
_CACHED_ELEMENTS = 2**17


def write_pseudo_tokens_(
    slots: Tensor,
    places: Tensor,
    shown: Tensor | None,
    center: Tensor,
    words: Tensor,
    modes: Tensor,
    turn: tuple[Tensor, Tensor] | None = None,
    *,
    looped: bool = False,
) -> None:
    """Write keys, or values, of n prototypes with up to S pseudo-tokens each.

    Args:
        slots: `[N, D]` of any float dtype.
        places: `[n, S]` int64, rows of `slots`.
        shown: `[n, S]` bool, which of these are written, the first ones of each; None: all.
        center: `[n, D]` float32.
        words: `[w, D / G]` float32, codewords.
        modes: `[n, S, G]` int64, those that are added to the centre.
        turn: cos and sin `[n, D]` float32 of the prototypes' positions; None: not turned.
        looped: by `loops`, where these write such slots.
    """
    if looped:
        from protokv.memory.protokv.loops import showing

        if slots.dtype in showing.BITS:
            showing.write_pseudo_tokens_(slots, places, shown, center, words, modes, turn)
            return
    (n, S), D = places.shape, center.shape[1]
    for part in cut(n, _CACHED_ELEMENTS // (S * D), slots.device):
        new = words.index_select(0, modes[part].reshape(-1)).view(-1, S, D).add_(center[part, None])
        if turn is not None:
            new = rotate(new, *(angle[part, None] for angle in turn))
        new, there = new.to(slots.dtype), places[part]
        if shown is None:
            write_rows_(slots, there.reshape(-1), new.flatten(0, 1))
        else:
            write_rows_(slots, there[shown[part]], new[shown[part]])
