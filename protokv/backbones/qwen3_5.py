"""Qwen3.5 as a backbone: the steps of Qwen3-VL, and a hybrid language model.

A step is that of Qwen3-VL, its time as text included, but feeds no layer (no DeepStack). Three of four layers are gated
delta nets, linear attention with a recurrent state of constant size and a short convolution; they run by transformers'
own code on the states of `Carried`. The others have full attention with gated outputs and serve a memory. They rotate
a part of each key by interleaved M-RoPE, and so does a memory (`core.rotary`).

A linear layer reads all tokens in order and cannot read some of them again, so `recent_frames` is refused.
"""

from __future__ import annotations

from typing import ClassVar

from protokv.backbones.qwen3_vl import Qwen3VL


class Qwen35(Qwen3VL):
    """Qwen3.5 of any size, dense or mixture of experts."""

    models: ClassVar[dict[str, str]] = {
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    }
