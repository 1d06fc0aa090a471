"""Literal attention, equation 3 of the paper: one softmax over everything in float32.

It casts keys and values to float32 and holds all logits at once. Tests compare the fast attention
with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.core.context import KVSegment
from protokv.core.rotary import rotate


def attend(
    query: Tensor, segments: Sequence[KVSegment], tail: tuple[Tensor, Tensor], scaling: float
) -> Tensor:
    """Return softmax attention of `T` queries over all segments and, causally, over the `n` tokens
    of the tail.

    Args:
        query: `[Hq, T, D]`, rotated; query `i` is the token `n - T + i` of the tail.
        segments: of the context of the layer.
        tail: keys `[H, n, D]`, values `[H, n, D]`, `n >= T`.
        scaling: the factor on the logits, usually `D ** -0.5`.

    Returns:
        `[Hq, T, D]` in the dtype of the query.
    """
    heads, T, D = query.shape
    H = tail[0].shape[0]
    shown = torch.cat([*(segment.values[..., :D] for segment in segments), tail[1]], 1).float()
    weighed = weights(query, segments, tail[0], scaling).view(H, -1, shown.shape[1]) @ shown
    return weighed.view(heads, T, D).to(query.dtype)


def weights(
    query: Tensor, segments: Sequence[KVSegment], tail_keys: Tensor, scaling: float
) -> Tensor:
    """Return the weight of each of N slots and of n `tail_keys` for each query, `[Hq, T, N + n]`
    float32.
    """
    heads, T, D = query.shape
    H, n = tail_keys.shape[:2]
    asked = query.float()

    def logits_of(queries: Tensor, keys: Tensor) -> Tensor:
        folded = (queries * scaling).reshape(H, -1, D)
        return (folded @ keys.transpose(1, 2)).view(H, heads // H, T, -1)

    logits = []
    for segment in segments:
        rotated = asked if segment.query_rotation is None else rotate(asked, segment.query_rotation)
        logits.append(
            logits_of(rotated, segment.keys[..., :D].float()) + segment.bias[:, None, None]
        )
    future = (
        torch.arange(n, device=query.device) > torch.arange(n - T, n, device=query.device)[:, None]
    )
    logits.append(logits_of(asked, tail_keys.float()).masked_fill(future, -torch.inf))
    return torch.cat(logits, -1).softmax(-1).view(heads, T, -1)
