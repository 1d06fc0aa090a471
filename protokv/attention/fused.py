"""Attention over a context and a tail at the cost of attention without a bias.

Each set of tokens is attended to by itself, with its log-sum-exp, and the results are merged: the tail is causal and
the slots are not, slots may want their queries turned, and no kernel takes both in one call without a mask of all
queries by all tokens. The query heads of a KV head stand one below the other, so keys and values are never repeated;
the bias of a slot is broadcast over queries; keys and values are read in their dtype, where they are.

The same as `plain`, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.attention.kernels import attention
from protokv.attention.tail import causal_mask
from protokv.context import Segment
from protokv.rotary import rotate


def attend(
    query: Tensor,
    segments: Sequence[Segment],
    tail: tuple[Tensor, Tensor],
    scaling: float,
    causal: Tensor | None = None,
) -> Tensor:
    """Softmax attention of `T` queries over the slots of all segments and, causally, over the `n` tokens of the tail.

    Args:
        query: `[Hq, T, D]`, rotated; query `i` is the token `n - T + i` of the tail.
        segments: what the layer reads of a context, `N` slots each; keys and values in the dtype of the query.
        tail: keys `[H, n, D]`, values `[H, n, D]`, `n >= T`.
        scaling: the factor on the logits, usually `D ** -0.5`.
        causal: `causal_mask` of these numbers if it is at hand.

    Returns:
        `[Hq, T, D]` in the dtype of the query.
    """
    heads, T, D = query.shape
    keys, values = tail
    H, n = keys.shape[:2]
    folded = query.reshape(H, -1, D)
    if causal is None:
        causal = causal_mask(T, n, heads // H, query.device)
    parts = [attention(folded, keys, values, causal, scaling)]
    for segment in segments:
        if not segment.keys.shape[1]:
            continue
        asked = folded
        if segment.turn is not None:
            asked = rotate(folded, *segment.turn).to(query.dtype)
        parts.append(attention(asked, segment.keys, segment.values, segment.bias.unsqueeze(1), scaling))
    if T == 1 and len(parts) == 2 and query.device.type == "cpu":
        return merged_pair(*parts).view(heads, T, D)
    return merged(parts).view(heads, T, D)


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """One attention from attentions over disjoint sets of tokens.

    Args:
        parts: outputs `[H, M, D]` and their log-sum-exp `[H, M]` float32, as `kernels.attention` returns them.

    Returns:
        `[H, M, D]` in the dtype of the outputs, summed in float32.
    """
    first = parts[0][0]
    if len(parts) == 1:
        return first
    shares = torch.stack([lse for _, lse in parts], -1).softmax(-1)
    total = first * shares[..., :1]
    for index, (out, _) in enumerate(parts[1:], start=1):
        # The last sum is rounded to the dtype as it is written.
        into = torch.empty_like(first) if index == len(parts) - 1 else None
        total = torch.addcmul(total, out, shares[..., index : index + 1], out=into)
    return total


def merged_pair(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """`merged` of two for one query on a CPU, whose time goes into calls, and most of it into the first ones of a kind:
    their code has left the cache while the context was read. More calls in half precision, but of fewer kinds."""
    share = (other[1] - one[1]).sigmoid_().unsqueeze(-1)
    return torch.lerp(one[0].float(), other[0].float(), share).to(one[0].dtype)
