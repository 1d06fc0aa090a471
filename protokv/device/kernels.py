"""Softmax attention that also returns its log-sum-exp, by the kernel that fits device and dtype.

torch's public `scaled_dot_product_attention` does not return the log-sum-exp; its kernels do. Those
of CUDA take a mask in the dtype of the query alone, which is exact for 0 and `-inf` and too coarse
for a bias. So in half precision the bias is a part of the product: further columns of the keys hold
it, in parts that add up to float32's precision, and the query has 1 there. No kernel needs a
compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from platform import machine

import torch
from torch import Tensor
from torch.nn import functional

HALF_DTYPES = (torch.float16, torch.bfloat16)
BIAS_COLUMNS = 8  # columns behind the keys for the bias: rows of keys stay aligned to 16 bytes
_USED_COLUMNS = 3  # of these, the first ones, whose numbers add up to the bias
# The part of a free slot in each column, before the scale. It hides the slot beside any other, and
# lies so near to 0 that the logits of slots that are all free are finite and exact in every dtype.
_FREE = -(2.0**15)
_FLASH = 256  # the largest head that flash attention takes


def compute_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return attention of queries `[H, M, D]` over keys and values `[H, N, D]` of one dtype, `N >
    0`.

    The mask, float32, is added to the logits: `[H, 1, N]`, the same for all queries, or `[1, M,
    N]`, the same in all heads. No row may be all `-inf`: it has no log-sum-exp. `scaling` is the
    factor on the logits.

    Returns:
        `[H, M, D]` in the dtype of the query, and the natural log of the sum of exponentials, `[H,
        M]` float32.
    """
    device = query.device.type
    size = query.shape[-1]
    if device == "cpu":
        return _cpu(query, keys, values, mask, scaling)
    exact = query.dtype not in HALF_DTYPES or mask is None or mask.shape[1] > 1
    if device == "cuda" and _is_aligned(size) and exact:
        return _efficient(query, keys, values, mask, scaling)
    return _by_products(query, keys, values, mask, scaling)


def compute_biased_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scaling: float,
    wide: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `compute_attention` with a finite bias `[H, N]` float32; keys and values may have its
    columns.

    `wide` is what `append_ones` returns for the query, if it is at hand.
    """
    D = query.shape[-1]
    if keys.shape[-1] == D and not uses_bias_columns(D, keys.dtype, keys.device):
        return compute_attention(query, keys, values, bias.unsqueeze(1), scaling)
    if keys.shape[-1] == D or scaling != D**-0.5:
        # Columns are made for the usual scaling.
        columns = make_bias_columns(bias, scaling, keys.dtype)
        keys, values = append_bias_columns(keys[..., :D], values[..., :D], columns)
    return attend_wide(append_ones(query) if wide is None else wide, keys, values, D, scaling)


def attend_wide(
    wide: Tensor, keys: Tensor, values: Tensor, features: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return `compute_attention` of queries of `append_ones`, over keys that have the columns of
    their bias, in the first `features`.
    """
    D = features
    if D + BIAS_COLUMNS > _FLASH or not has_flash(wide.device):
        out, lse = compute_attention(wide, keys, values, None, scaling)
        return out[..., :D], lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        wide[None], keys[None], values[None], 0.0, False, False, scale=scaling
    )
    return out[0, ..., :D], lse[0]


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]], groups: int) -> Tensor:
    """Merge attentions over disjoint sets of tokens into the attention over all of them, summed in
    float32.

    Parts are outputs `[H, M, D]` of M = groups * T queries, and their log-sum-exp `[H, M]` float32,
    as `compute_attention` returns them. Returns `[H * groups, T, D]`, on a device token by token,
    as a model reads it.
    """
    total, (H, M, D) = parts[0][0], parts[0][0].shape
    if len(parts) > 1:
        outs = [out for out, _ in parts]
        shares = torch.stack([lse for _, lse in parts], -1).softmax(-1)
        rounded = torch.empty_like(total)
        if total.is_cuda:
            outs = [out.view(H, groups, -1, D) for out in outs]
            shares = shares.view(H, groups, M // groups, -1)
            rounded = total.new_empty(M // groups, H, groups, D).permute(1, 2, 0, 3)
        total = outs[0] * shares[..., :1]
        for index, out in enumerate(outs[1:], start=1):
            # The last sum is rounded to the dtype as it is written.
            into = rounded if index == len(parts) - 1 else None
            total = torch.addcmul(total, out, shares[..., index : index + 1], out=into)
    return total.reshape(H * groups, -1, D)


def merge_attention_pair(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Merge two parts as `merge_attention` does, with fewer kinds of calls, which cost most for one
    query on a CPU.
    """
    share = (other[1] - one[1]).sigmoid_().unsqueeze(-1)
    return torch.lerp(one[0].float(), other[0].float(), share).to(one[0].dtype)


def uses_bias_columns(head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether kernels for such keys read the bias of slots from columns of the keys."""
    return device.type == "cuda" and dtype in HALF_DTYPES and _is_aligned(head_size)


def attends_in_windows(head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether flash attention takes all windows of such heads in one call."""
    return uses_bias_columns(head_size, dtype, device) and has_flash(device)


def make_bias_columns(bias: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return what adds a float32 bias `[..., N]` to logits, times `scaling`: the first columns,
    `[..., N, 3]`.
    """
    rest = (bias / scaling).clamp_(min=_USED_COLUMNS * _FREE)
    columns = list[Tensor]()
    for _ in range(_USED_COLUMNS):
        # Each holds what the ones before it have rounded off.
        columns.append(rest.clamp(min=_FREE).to(dtype))
        rest = rest - columns[-1]
    return torch.stack(columns, -1)


def stack_queries(query: Tensor, heads: int) -> tuple[Tensor, Tensor | None]:
    """Return queries `[Hq, T, D]` as those of so many heads, `[H, groups * T, D]`, and the same by
    `append_ones` if slots are read so.
    """
    D = query.shape[2]
    if not uses_bias_columns(D, query.dtype, query.device):
        return query.reshape(heads, -1, D), None
    # One copy stacks them, too.
    wide = append_ones(query).view(heads, -1, D + BIAS_COLUMNS)
    return wide[..., :D], wide


def append_ones(query: Tensor) -> Tensor:
    """Return queries `[..., D + BIAS_COLUMNS]` that read the bias in the columns of keys."""
    return functional.pad(query, (0, BIAS_COLUMNS), value=1.0)


def hide_rows_(keys: Tensor, hidden: Tensor) -> None:
    """Give rows of keys `[..., N, D + BIAS_COLUMNS]` the bias of a free slot where `hidden` `[N]`,
    else none.
    """
    keys[..., -BIAS_COLUMNS : _USED_COLUMNS - BIAS_COLUMNS] = hidden[:, None] * _FREE


def append_bias_columns(keys: Tensor, values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys `[..., N, D + BIAS_COLUMNS]` with the columns of their bias, and values with as
    many zeros.
    """
    zeros = columns.new_zeros(()).expand(*columns.shape[:-1], BIAS_COLUMNS - columns.shape[-1])
    return torch.cat((keys, columns, zeros), -1), functional.pad(values, (0, BIAS_COLUMNS))


def _is_aligned(head_size: int) -> bool:
    """Return whether CUDA's kernels take such heads: they read 16 bytes at a time."""
    return head_size % 8 == 0 and head_size >= 16


def has_bfloat16_instructions() -> bool:
    """Return whether this processor has instructions for products of bfloat16; else they take
    several times as long.
    """
    if machine() in ("arm64", "aarch64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices of bfloat16 faster than those of float32."""
    return has_bfloat16_instructions() if device.type == "cpu" else has_flash(device)


@cache
def has_flash(device: torch.device) -> bool:
    """Return whether flash attention runs on a device of CUDA."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 8


def _cpu(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Call torch's fused CPU kernel. It reads the mask in place, broadcast by a stride of 0."""
    # With few queries the calls themselves cost much, so views are made in the cheapest way.
    masks = None if mask is None else mask.expand(1, query.shape[0], query.shape[1], -1)
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], attn_mask=masks, scale=scaling
    )
    return out[0], lse[0]


def fit_mask(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask as the kernel of CUDA takes it, in the dtype of the query and in aligned rows;
    others as it is.
    """
    aligned = not any(step % 16 for step in (mask.storage_offset(), *mask.stride()[:-1]))
    if query.device.type != "cuda" or (mask.dtype == query.dtype and aligned):
        return mask
    N = mask.shape[-1]
    return functional.pad(mask.to(query.dtype), (0, -N % 16))[..., :N]


def _efficient(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Call CUDA's memory-efficient kernel."""
    H = query.shape[0]
    M = query.shape[1]
    N = keys.shape[1]
    masks = None if mask is None else fit_mask(mask, query).expand(H, M, N)[None]
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query[None], keys[None], values[None], masks, True, scale=scaling
    )
    return out[0], lse[0, :, :M]


def _by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Compute two products and a float32 softmax, for devices without a kernel that returns the
    log-sum-exp.
    """
    logits = torch.matmul(query.float() * scaling, keys.float().transpose(1, 2))
    if mask is not None:
        logits = logits + mask
    lse = logits.logsumexp(-1)
    return torch.matmul((logits - lse[..., None]).exp(), values.float()).to(query.dtype), lse
