"""The form in which transformers calls this attention.

Owns the name under which it is registered. Knows nothing of a model but the number of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protokv.attention.joint import attend_to
from protokv.attention.tail import Tail
from protokv.context import Context

NAME = "protokv"


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    protokv_context: Context,
    protokv_tail: Tail,
    **_: Any,
) -> tuple[Tensor, None]:
    """The form transformers calls: query `[1, Hq, T, D]`, key and value `[1, H, T, D]`, returns `[1, T, Hq, D]`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = attend_to(layer, query[0], key[0], value[0], protokv_context, protokv_tail, scaling)
    return out.transpose(0, 1).unsqueeze(0), None


def register() -> None:
    """Make `attn_implementation="protokv"` known to transformers. No mask function goes with it: none is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
