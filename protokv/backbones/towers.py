"""For vision towers of Qwen families: arguments that follow from the sizes of pictures, and
attention in windows.

A tower that is not given these arguments computes them on the device, and the host waits for them
in every layer; no capture could hold that. A tower attends in one window after the other. Here, in
half precision on a device, one call of torch's flash attention serves all windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, vision_utils

from protokv.device import kernels
from protokv.texts import Keywords

# transformers hands the lengths of parts to attention of this name: `flash` is in it.
_IN_PARTS = "protokv_flash_in_parts"


def supports_varlen(tower: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a tower can attend in all parts of a sequence by one call."""
    size = tower.blocks[0].attn.head_dim
    return kernels.attends_in_windows(size, dtype, device)


def make_tower_inputs(tower: Any, sizes: Tensor, device: torch.device, in_parts: bool) -> Keywords:
    """Return the arguments of a tower for pictures of these sizes, patches `[n, 3]` int64 (1, rows,
    columns).
    """
    merge = tower.spatial_merge_size
    found: Keywords = {"video_grid_thw": sizes}
    found["position_ids"] = vision_utils.get_vision_position_ids(sizes, merge).to(device)
    found["cu_seqlens"] = vision_utils.get_vision_cu_seqlens(sizes)
    if hasattr(tower, "window_size"):
        index, parts = vision_utils.get_vision_window_index(
            sizes, merge, tower.window_size, tower.patch_size
        )
        found |= {"window_index": index.to(device), "cu_window_seqlens": parts}
    if hasattr(tower, "interpolation_mode"):
        index, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            sizes,
            tower.num_grid_per_side,
            tower.interpolation_mode,
            tower.interpolation_align_corners,
            merge,
        )
        found |= {"interp_indices": index.to(device), "interp_weights": weights.to(device)}
    for kind in ("", "window_") if in_parts else ():
        if (parts := found.get(f"cu_{kind}seqlens")) is not None:
            found |= {
                f"max_{kind}seqlen": int(parts.diff().max()),
                f"cu_{kind}seqlens": parts.to(device),
            }
    return found


@contextmanager
def use_varlen_attention(tower: Any) -> Iterator[None]:
    """Let a tower attend in all windows by one call, within the block."""
    config = tower.config
    before = tower.config._attn_implementation
    config._attn_implementation = _IN_PARTS
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend_in_parts(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with `[1, H, n, D]` within parts that begin at `cu_seq_lens_q`; returns `[1, n, H,
    D]`.
    """
    queries, keys, values = (one[0].transpose(0, 1) for one in (query, key, value))
    begins = cu_seq_lens_q
    most = max_length_q
    out, *_rest = torch.ops.aten._flash_attention_forward(
        queries, keys, values, begins, begins, most, most, 0.0, False, False, scale=scaling
    )
    return out[None], None


AttentionInterface.register(_IN_PARTS, _attend_in_parts)
