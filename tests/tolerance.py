"""The largest distance of two results that differ only in the order of their sums."""

import math
from typing import Any, TypedDict

import torch
from torch import Tensor

from protokv.core.layers import LayerKind
from protokv.stream.session import Session

# Of that many standard deviations a random walk is off once in thirty million; the tests compare
# fewer numbers.
_DEVIATIONS = 6.0


class Tolerance(TypedDict):
    """The arguments of `torch.testing.assert_close`."""

    rtol: float
    atol: float


def tolerance(dtype: torch.dtype, terms: int, scale: float = 1.0) -> float:
    """The largest difference between two sums of the same `terms` terms, each added up in an order
    of its own.

    Every addition and product is off by a share of up to u, half the distance from 1 to the next
    number of the dtype. At the worst a sum of n is off by n u times the sum of the magnitudes of
    its terms (Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 3.1 and 4.2);
    as a random walk by less than 6 sqrt(n) u times it, but for a probability of 3e-8 (Higham and
    Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). Two sums may be off on different sides.

    Args:
        dtype: in which is added up, or that of the result if it is rounded then; the roundings
            count.
        terms: on the longest way from what both got to what is compared.
        scale: the sum of the magnitudes of the terms; the largest value of a mean, or the largest
            result.
    """
    worst = terms * torch.finfo(dtype).eps / 2 * scale
    return 2 * min(worst, _DEVIATIONS * deviation(dtype, terms, scale))


def deviation(dtype: torch.dtype, terms: int, scale: float = 1.0) -> float:
    """One standard deviation of that walk, of one sum: the root mean square of what many sums are
    off by.
    """
    return math.sqrt(terms) * torch.finfo(dtype).eps / 2 * scale


def near(expected: Tensor, terms: int, scale: float | None = None) -> Tolerance:
    """The tolerance for `torch.testing.assert_close`, the same for all numbers: rounding is as
    large in small sums.

    What is no float is not rounded: it is equal.
    """
    if not expected.is_floating_point():
        return {"rtol": 0.0, "atol": 0.0}
    if scale is None:
        shown = expected.detach()[expected.isfinite()]
        scale = float(shown.abs().max()) if shown.numel() else 0.0
    return {"rtol": 0.0, "atol": tolerance(expected.dtype, terms, scale)}


def check_near(found: Any, expected: Tensor, terms: int, scale: float | None = None) -> None:
    """Assert that all numbers are near, as `near` says."""
    torch.testing.assert_close(found, expected, **near(expected, terms, scale))


def forward_terms(layers: int, width: int, tokens: int) -> int:
    """Terms on the longest way through a model: in a layer eight products of the hidden size, and a
    softmax.

    The layers above enlarge some of what is off and shrink the rest: the tiny random models are off
    by 0.3 to 4.4 of what these terms say for one deviation.
    """
    return layers * (8 * width + tokens)


def near_logits(session: Session, expected: Tensor) -> Tolerance:
    """The same for what a session's model makes of all that it has seen, keys, values and
    logits.
    """
    backbone = session.backbone
    width = backbone.embed_text(backbone.prefix_ids).shape[1]
    tokens = len(backbone.prefix_ids) + session.clock.tokens_seen + expected.shape[0]
    # The tower that looks at the frames is not deeper than the language model, and both add up.
    layers = len(backbone.layer_kinds) or backbone.layers
    # Linear layers enlarge more: under two sets of kernels transformers' own forward was off by up
    # to 29 times this.
    enlarged = 64 if LayerKind.LINEAR in backbone.layer_kinds else 1
    return near(expected, enlarged * forward_terms(2 * layers, width, tokens))


def check_logits(session: Session, found: Tensor, expected: Tensor) -> None:
    """Assert that such numbers are near."""
    torch.testing.assert_close(found, expected, **near_logits(session, expected))
