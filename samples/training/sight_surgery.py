"""Set by hand how a question finds a visual token, in one early layer of a language model, before
any training.

The last word for what is asked about ("star", "red", "top left") attends to the visual token that
has it in its code, and takes up the other parts of that code as the embeddings of their words, so
"star" becomes a red star at the top left. Three heads of one layer do so, for colours, shapes and
places. What words and visual tokens say there is read off the model's own states by linear readings
that are fitted to some hundred questions. Keys and queries stand on the rotary pairs that turn
least, so it does not matter how long ago something was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from samples.training.sight_language import LINK_LAYER, SCALE, Batch, LowRank, Reader
from samples.training.sight_tower import fit_codes

KINDS: Final = (slice(0, 8), slice(8, 16), slice(16, 25))
"""Colours, shapes and places in a code: what each of the three heads compares. It brings the other
two.
"""
HEAD: Final = 64
MATCH: Final = 45.0
"""Logit of a visual token that has what is asked about, above one that has not."""
BROUGHT: Final = 15.0
"""How strong the words are that a head brings, in embeddings; states there are 40 times as long as
an embedding.
"""
SLOW: Final = (*range(24, 32), 63)
"""Places in a head that turn little over thousands of tokens."""
KEY: Final = 5.0
RIDGE: Final = 1e-2


@torch.no_grad()
def plant(reader: Reader, batches: Sequence[Batch]) -> float:
    """Set the links of a fresh reader from questions that are cut; return the share of asked words
    that it knows.
    """
    attention = reader.model.model.layers[LINK_LAYER].self_attn
    states = [reader.states(batch, LINK_LAYER, normed=True) for batch in batches]
    asked, seen, others = (
        torch.cat(one) for one in zip(*map(_split, batches, states), strict=True)
    )
    words, codes = (
        torch.cat([getattr(b, name).flatten(0, -2) for b in batches]) for name in ("named", "codes")
    )
    codes, nothing = codes.round(), torch.zeros(len(others), codes.shape[1])
    everything = torch.cat((asked, seen, others))
    query, _ = fit_codes(everything, torch.cat((words, codes * 0, nothing)), RIDGE)
    key, _ = fit_codes(everything, torch.cat((words * 0, codes, nothing)), RIDGE)
    value, _ = fit_codes(
        torch.cat((seen, seen, everything)),
        torch.cat((codes, codes, words * 0, codes, nothing)),
        RIDGE,
    )
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(attention, name).up.zero_()
    for group, kind in enumerate(KINDS):
        n = kind.stop - kind.start
        places = HEAD * group + torch.tensor(SLOW[:n])
        _write(attention.q_proj, query, kind, places + 2 * HEAD * group, 8 * MATCH / KEY)
        _write(attention.k_proj, key, kind, places, KEY)
        for other in KINDS:
            if other != kind:
                _write(attention.v_proj, value, other, HEAD * group + torch.arange(25)[other], 1.0)
    out = attention.o_proj
    out.down.zero_()
    for group, kind in enumerate(KINDS):
        for code in set(range(25)).difference(range(25)[kind]):
            out.down[code, 3 * HEAD * group + code] = 1.0
    out.up[:, :25] = BROUGHT / SCALE * reader.codebook[:25].T
    return float(((asked @ query.T).argmax(1) == words.argmax(1)).float().mean())


def _write(
    projection: LowRank, reading: Tensor, codes: slice, rows: Tensor, strength: float
) -> None:
    """Let a projection write some numbers of a reading `[CODES, hidden]` to rows of its output."""
    size = reading[:25].norm() / 50
    projection.down[codes] = reading[codes] / size
    projection.up[rows, torch.arange(25)[codes]] = strength * size / SCALE


def _split(batch: Batch, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states of asked words, of visual tokens, and of all other words."""
    m = batch.labels.shape[1]
    n = batch.codes.shape[1]
    words = state[:, -m:]
    others = torch.cat((words[~batch.asked & batch.real], state[:, 0]))
    return words[batch.asked], state[:, 1 : 1 + n].flatten(0, 1), others
