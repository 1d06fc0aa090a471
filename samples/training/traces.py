"""A penalty on changes that new layers make to tokens that must stay the same, weighted by kind of
token.

Later layers were not trained with these changes, so any of them makes answers worse. Knows no links
and no stages.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from samples.training.visual_tokens import N_PREFIX

_VISUAL: Final = 2.0
_WORDS: Final = 30.0
_CHANGED: Final = 0.03
"""Weights of mean squares. Words are 13 times fainter than visual tokens; words that must change
weigh little.
"""


def measure_traces(
    moved: Tensor, lit: Tensor, present: Tensor, words: Tensor, changed: tuple[Tensor, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Return the weighted mean square of the changes `moved` `[B, L, hidden]`, and its root for
    each kind of token.

    `lit` and `present` `[B, N]` mark visual tokens, `words` `[B, L - prefix - N]` marks words that
    are not padding, and `changed` has the videos and positions among the L tokens, `[n]` each, of
    words that must change.
    """
    nv = N_PREFIX + lit.shape[1]
    square = moved.square().mean(-1)
    rest = torch.ones_like(square, dtype=torch.bool)
    rest[:, N_PREFIX:nv], rest[:, nv:] = False, words
    rest[changed] = False
    visual = square[:, N_PREFIX:nv]
    found = {
        "lit": visual[lit & present].mean(),
        "unlit": visual[~lit & present].mean(),
        "words": square[rest].mean(),
        "changed": square[changed].mean(),
    }
    loss = (
        _VISUAL * (found["lit"] + found["unlit"])
        + _WORDS * found["words"]
        + _CHANGED * found["changed"]
    )
    return loss, {f"trace_{name}": value.item() ** 0.5 for name, value in found.items()}
