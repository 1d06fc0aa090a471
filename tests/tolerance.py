"""The largest distance of two results that differ only in the order of their sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protokv.core.layers import LayerKind
from protokv.core.session import Session

# Of that many standard deviations a random walk is off once in thirty million; the tests compare fewer numbers.
_DEVIATIONS = 6.0


def tolerance(dtype: torch.dtype, terms: int, scale: float = 1.0) -> float:
    """The largest difference between two sums of the same `terms` terms, each added up in an order of its own.

    Every addition and every product rounds: its result is off by a share of up to u, half the distance from 1 to the
    next number of the dtype. Of n roundings one behind the other

    - at the worst all go one way: a sum is off by n u times the sum of the magnitudes of its terms (N. J. Higham,
      Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, sections 3.1 and 4.2),
    - in fact they go either way, as a random walk does: it is off by less than 6 sqrt(n) u times that sum but for a
      probability of 2 exp(-6**2 / 2), which is 3e-8 (N. J. Higham and T. Mary, A New Approach to Probabilistic
      Rounding Error Analysis, SIAM Journal on Scientific Computing 41(5), 2019, theorem 2.4).

    The smaller of the two holds in any order: one after the other, in lanes of 4, 8 or 16, or a part on each thread.
    Two results may be off on different sides, so that their distance may be twice as large.

    Args:
        dtype: in which is added up; where a kernel adds up in float32 and rounds what it returns, the dtype of that,
            and the roundings count.
        terms: added up on the longest way from what both got to what is compared.
        scale: the sum of the magnitudes of the terms. Of a mean, and of what a softmax weighs, that is the largest
            value; where it is not known, the largest result stands for it.
    """
    worst = terms * _unit_roundoff(dtype) * scale
    return 2 * min(worst, _DEVIATIONS * deviation(dtype, terms, scale))


def deviation(dtype: torch.dtype, terms: int, scale: float = 1.0) -> float:
    """One standard deviation of that walk, of one sum: the root mean square of what many sums are off by."""
    return math.sqrt(terms) * _unit_roundoff(dtype) * scale


def _unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def near(expected: Tensor, terms: int, scale: float | None = None) -> dict[str, float]:
    """The tolerance for `torch.testing.assert_close`, the same for all numbers: rounding is as large in small sums.

    What is no float is not rounded: it is equal.
    """
    if not expected.is_floating_point():
        return {"rtol": 0.0, "atol": 0.0}
    if scale is None:
        shown = expected.detach()[expected.isfinite()]
        scale = float(shown.abs().max()) if shown.numel() else 0.0
    return {"rtol": 0.0, "atol": tolerance(expected.dtype, terms, scale)}


def forward_terms(layers: int, width: int, tokens: int) -> int:
    """Terms on the longest way through a model.

    Of a layer: four products of the hidden size for attention and four for the MLP, which is not wider than four of
    them, and a softmax over the tokens. What a layer gets wrong goes through those above it, which enlarge some of it
    and shrink the rest: the tiny random models are off by 0.3 to 4.4 of what these terms say for one deviation.
    """
    return layers * (8 * width + tokens)


def near_logits(session: Session, expected: Tensor) -> dict[str, float]:
    """The same for what a session's model makes of all that it has seen, keys, values and logits.

    The tower that looks at the frames is not deeper than the language model, and both add up.
    """
    backbone = session.backbone
    width = backbone.embed_text(backbone.prefix_ids).shape[1]
    tokens = len(backbone.prefix_ids) + session.clock.tokens_seen + expected.shape[0]
    layers = len(backbone.layer_kinds) or backbone.layers
    # Linear layers enlarge more: under two sets of kernels transformers' own forward was off by up to 29 times this.
    enlarged = 64 if LayerKind.LINEAR in backbone.layer_kinds else 1
    return near(expected, enlarged * forward_terms(2 * layers, width, tokens))
