"""What layers leave behind in tokens that are not to change: a penalty, by how loud each kind of token is.

Layers behind do not know that something was added, so whatever they can see there makes their answers worse. Knows no
links and no stages.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from samples.training.visual_tokens import N_PREFIX

_VISUAL: Final = 2.0
_WORDS: Final = 30.0
_CHANGED: Final = 0.03
"""Weights of mean squares. Words are 13 times fainter than visual tokens; what is to change is only kept small."""


def measure_traces(
    moved: Tensor, lit: Tensor, present: Tensor, words: Tensor, changed: tuple[Tensor, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """The weighted mean squares of `moved` `[B, L, hidden]`, and the root mean square of each kind of token.

    `lit` and `present` `[B, N]` are of visual tokens, `words` `[B, L - prefix - N]` marks those that are no padding,
    `changed` are videos and positions among the L tokens, `[n]` each, of the words that are to change.
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
    loss = _VISUAL * (found["lit"] + found["unlit"]) + _WORDS * found["words"] + _CHANGED * found["changed"]
    return loss, {f"trace_{name}": value.item() ** 0.5 for name, value in found.items()}
