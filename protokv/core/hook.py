"""Make transformers call the attention of `LocalKV`: a function of the form it expects, and its name there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protokv.core.attention import LocalKV
from protokv.core.context import Context

NAME = "protokv"


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    protokv_context: Context,
    protokv_local: LocalKV,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: query `[1, Hq, T, D]`, key and value `[1, H, T, D]`, returns `[1, T, Hq, D]`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = protokv_local.attend(layer, query[0], key[0], value[0], protokv_context, scaling)
    return out.transpose(0, 1).unsqueeze(0), None


def register() -> None:
    """Make `attn_implementation="protokv"` known to transformers. It has no mask function, so no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
