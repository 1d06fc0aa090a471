"""How much of what a token reads comes from each slot: the weights of its attention, which the kernels do not return.

Made again from queries, keys and bias, for the tokens and layers that somebody asks about; attention itself is as it
was. The same as `plain.weights`, up to the order of sums, for one token and the mean of a group of heads. Knows nothing
of stream time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.context import Segment
from protokv.rotary import rotate


def shares(query: Tensor, segments: Sequence[Segment], tail_keys: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """What the last token of the tail reads from where, the mean over the query heads of a KV head.

    Args:
        query: `[Hq, D]`, rotated.
        segments: what the layer read of a context, `N` slots together.
        tail_keys: `[H, n, D]`, all of which the token sees.
        scaling: the factor on the logits.

    Returns:
        `[H, N]` of the slots and `[H, n]` of the tail, float32; together they sum to 1 in each head.
    """
    H, _, D = tail_keys.shape
    asked = query.float() * scaling
    parts = []
    for segment in segments:
        turned = asked if segment.turn is None else rotate(asked, *segment.turn)
        logits = torch.matmul(turned.view(H, -1, D), segment.keys.float().transpose(1, 2))
        parts.append(logits + segment.bias[:, None])
    parts.append(torch.matmul(asked.view(H, -1, D), tail_keys.float().transpose(1, 2)))
    # Merged as attention over disjoint sets is: each by its own sum of exponentials.
    total = torch.stack([part.logsumexp(-1) for part in parts if part.shape[-1]], -1).logsumexp(-1, keepdim=True)
    *slots, tail = [(part - total).exp().mean(1) for part in parts]
    return torch.cat([tail[:, :0], *slots], 1), tail
