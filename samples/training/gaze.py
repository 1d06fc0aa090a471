"""The attention of single tokens over the video in one layer, and its distance from the wanted
attention.

Computes the attention of single rows, which the forward pass does not keep. Knows no events and no
stages.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from samples.training.forward import make_rotary_tables, normalise, turn_pairs
from samples.training.visual_tokens import N_PREFIX, VisualTokens, make_masks, make_positions

_LEAST: Final = -60.0


def read_gaze(
    model: Qwen2_5_VLForConditionalGeneration,
    layer: int,
    state: Tensor,
    tokens: VisualTokens,
    questions: Tensor,
    rows: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the logarithm of the attention `[n, heads, nv]` of some question tokens over prefix
    and video.

    `state` `[B, L, hidden]` is the input of the layer, `questions` `[B, Q, R]` are ids, `rows` are
    videos and positions among the L tokens, `[n]` each. Question tokens do not see each other here:
    the shares of prefix and video sum to 1.
    """
    found = model.model.language_model.layers[layer]
    attention = found.self_attn
    D = found.self_attn.head_dim
    nv = N_PREFIX + tokens.times.shape[1]
    state = normalise(state, found.input_layernorm.weight)
    cos, sin = make_rotary_tables(model, make_positions(tokens, *questions.shape[1:]))

    q = turn_pairs(attention.q_proj(state[rows]).unflatten(-1, (-1, D)), cos[rows], sin[rows])
    k = turn_pairs(attention.k_proj(state[:, :nv]).unflatten(-1, (-1, D)), cos[:, :nv], sin[:, :nv])
    k = k.repeat_interleave(q.shape[1] // k.shape[2], 2)
    scores = torch.einsum("nhd,nthd->nht", q, k[rows[0]]) * D**-0.5
    _, bias = make_masks(tokens, scores.dtype)
    shares: Tensor = (scores + bias[rows[0]]).log_softmax(-1)
    return shares


def measure_gaze(gaze: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean divergence of log attention `[n, heads, nv]` from equal shares of `wanted`
    tokens `[n, nv]`.
    """
    share = wanted / wanted.sum(-1, keepdim=True)
    lost = -(share[:, None] * gaze.clamp(min=_LEAST)).sum(-1).mean()
    return lost - wanted.sum(-1).log().mean()


def measure_miss(gaze: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean of -log of the joint share of the tokens `wanted` in the mean attention of
    all heads.
    """
    there = gaze + torch.where(wanted > 0, 0.0, -torch.inf)[:, None]
    return math.log(gaze.shape[1]) - there.flatten(1).logsumexp(-1).mean()
