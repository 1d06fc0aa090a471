"""Softmax attention that also returns its log-sum-exp, by the kernel that fits device and dtype.

torch's public `scaled_dot_product_attention` does not return the log-sum-exp; its kernels do. Masks are float32 and are
added to float32 logits in every kernel but CUDA's for one mask a query, whose 0 and `-inf` are exact in any dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HALVES = (torch.float16, torch.bfloat16)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return attention of `M` queries over `N` keys in each of `H` heads.

    Args:
        query: `[H, M, D]`.
        keys: `[H, N, D]`, the dtype of the query, `N > 0`.
        values: `[H, N, D]`, likewise.
        mask: float32, added to the logits: `[H, 1, N]`, the same for all queries, or `[1, M, N]`, the same in all
            heads. No row may be all `-inf`: it has no log-sum-exp.
        scaling: the factor on the logits.

    Returns:
        `[H, M, D]` in the dtype of the query, and the natural log of the sum of exponentials, `[H, M]` float32.
    """
    device, size = query.device.type, query.shape[-1]
    if device == "cpu":
        return _cpu(query, keys, values, mask, scaling)
    # The kernels read 16 bytes at a time.
    if device == "cuda" and size % 8 == 0 and size >= 16:
        if query.dtype in HALVES and mask is not None and mask.shape[1] == 1 < query.shape[1]:
            return _flex(query, keys, values, mask, scaling)
        if query.dtype not in HALVES or mask is None or mask.shape[1] > 1:
            return _efficient(query, keys, values, mask, scaling)
    return _by_products(query, keys, values, mask, scaling)


def _cpu(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Call torch's fused CPU kernel. It reads the mask in place, broadcast by a stride of 0."""
    # With one query the calls themselves cost much, so views are made in the cheapest way.
    masks = None if mask is None else mask.expand(query.shape[0], query.shape[1], -1).unsqueeze(0)
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=masks, scale=scaling
    )
    return out.squeeze(0), lse.squeeze(0)


def _efficient(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Call CUDA's memory-efficient kernel. It needs masks in the dtype of the query, and aligned rows."""
    H, M, N = query.shape[0], query.shape[1], keys.shape[1]
    masks = None
    if mask is not None:
        aligned = functional.pad(mask.to(query.dtype), (0, -N % 16))
        masks = aligned[..., :N].expand(H, M, N)[None]
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query[None], keys[None], values[None], masks, True, scale=scaling
    )
    return out[0], lse[0, :, :M]


def _flex(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Call compiled FlexAttention, which adds the bias to float32 logits inside the kernel."""
    bias = mask[:, 0]

    def with_bias(score: Tensor, _: Tensor, head: Tensor, __: Tensor, slot: Tensor) -> Tensor:
        return score + bias[head, slot]

    out, lse = _compiled_flex()(query[None], keys[None], values[None], with_bias, scaling)
    return out[0], lse[0]


@cache
def _compiled_flex() -> Callable[..., tuple[Tensor, Tensor]]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def call(query: Tensor, keys: Tensor, values: Tensor, score: Any, scaling: float) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(query, keys, values, score, scale=scaling, return_aux=AuxRequest(lse=True))
        assert aux.lse is not None
        return out, aux.lse

    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(call)
    return compiled


def _by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Compute two products and a float32 softmax, for devices without a kernel that returns the log-sum-exp."""
    logits = torch.matmul(query.float() * scaling, keys.float().transpose(1, 2))
    if mask is not None:
        logits = logits + mask
    lse = logits.logsumexp(-1)
    return torch.matmul((logits - lse[..., None]).exp(), values.float()).to(query.dtype), lse
