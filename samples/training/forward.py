"""The forward pass of the model for short training batches on a CPU: equal to that of transformers,
and faster.

A linear layer embeds the patches, attention is plain batched products, and one product gives
queries, keys and values of a layer. Questions about one video are independent blocks behind it that
start at the same position. A test compares the results with transformers in float32.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from samples.training.model import IMAGE_MEAN, IMAGE_STD, TOKENS
from samples.training.visual_tokens import HIDDEN, PREFIX, VisualTokens, make_masks, make_positions

QUESTION_TOKENS: Final = 18
"""Room for one question block: closing token, question, answer."""


@lru_cache(maxsize=4)
def _pixel_scale(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    mean = torch.tensor(IMAGE_MEAN)
    std = torch.tensor(IMAGE_STD)
    return (1 / 255 / std).view(1, 3, 1).to(dtype), (-mean / std).view(1, 3, 1).to(dtype)


def to_patches(frames: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the normalised patches `[N*36, 1176]`, in the processor's order, of frames `[N, 2, 84,
    84, 3]` uint8.
    """
    N = frames.shape[0]
    x = (
        frames.view(N, 2, 3, 2, 14, 3, 2, 14, 3)
        .permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        .reshape(N * 36, 3, 392)
    )
    scale, shift = _pixel_scale(dtype)
    return torch.addcmul(shift, x.to(dtype), scale).view(-1, 1176)


@lru_cache(maxsize=4)
def _vision_rotary(head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos, sin `[36, 1, head_size]` of patches in merge order; half the pairs rotate by row,
    half by column.
    """
    grid = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"), -1)
    order = grid.view(3, 2, 3, 2, 2).permute(0, 2, 1, 3, 4).reshape(36, 2).float()
    quarter = head_size // 4
    frequency = 1.0 / (10000.0 ** (torch.arange(quarter).float() * 2 / (head_size // 2)))
    angle = (order[:, :, None] * frequency).reshape(36, 1, head_size // 2)
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def encode_steps(visual: Any, patches: Tensor) -> Tensor:
    """Return the features `[N, 9, hidden]` of the patches of N steps; the tower attends within a
    step only.
    """
    n_heads = visual.config.num_heads
    projection = visual.patch_embed.proj.weight
    x = F.linear(patches, projection.view(projection.shape[0], -1))
    d = x.shape[-1]
    N = x.shape[0] // 36
    D = d // n_heads
    cos, sin = _vision_rotary(D, x.dtype)
    for block in visual.blocks:
        qkv = block.attn.qkv(block.norm1(x)).view(N, 36, 3, n_heads, D)
        q, k = (
            _turn(qkv[:, :, i], cos, sin).transpose(1, 2).reshape(N * n_heads, 36, D)
            for i in (0, 1)
        )
        v = qkv[:, :, 2].transpose(1, 2).reshape(N * n_heads, 36, D)
        weights = torch.bmm(q * D**-0.5, k.transpose(1, 2)).softmax(-1)
        mixed = torch.bmm(weights, v).view(N, n_heads, 36, D).transpose(1, 2).reshape(N * 36, d)
        x = x + block.attn.proj(mixed)
        x = x + block.mlp(block.norm2(x))
    merged: Tensor = visual.merger(x)
    return merged.view(N, TOKENS, -1)


def make_rotary_tables(
    model: Qwen2_5_VLForConditionalGeneration, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cos, sin `[B, L, 1, D/2]` of positions `[3, B, L]`; each M-RoPE section has its own
    component.
    """
    rope = model.config.text_config.rope_parameters
    sections = rope["mrope_section"]
    half = sum(sections)
    frequency = 1.0 / (rope["rope_theta"] ** (torch.arange(half).float() / half))
    parts = [positions[i].float()[..., None].expand(-1, -1, n) for i, n in enumerate(sections)]
    angle = torch.cat(parts, -1) * frequency
    dtype = model.lm_head.weight.dtype
    return angle.cos().to(dtype).unsqueeze(2), angle.sin().to(dtype).unsqueeze(2)


@lru_cache(maxsize=32)
def _causal(n: int, dtype: torch.dtype) -> Tensor:
    lower = torch.ones(n, n, dtype=torch.bool).tril()
    return torch.zeros(lower.shape, dtype=dtype).masked_fill_(~lower, HIDDEN)


def normalise(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Scale x `[..., hidden]` to root mean square 1, times `weight` if given, as the input of a
    layer.
    """
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of x `[..., D]`; cos and sin `[..., D/2]`."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def run_language(
    model: Qwen2_5_VLForConditionalGeneration,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    n_questions: int,
    video_bias: Tensor,
    question_bias: Tensor,
    select: Tensor,
    taps: Collection[int] = (),
    depth: int | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run the layers over x `[B, nv + Q*R, hidden]`: nv tokens of prefix and video, then Q
    questions of R tokens.

    The first nv tokens attend to each other with video_bias. A question attends to them with
    question_bias, to itself causally, and to no other question.

    Returns:
        The normed states `[n, hidden]` behind the last layer at the question tokens that `select`
        `[B, Q*R]` marks; and layer -> states `[B, nv + Q*R, hidden]` behind each layer in `taps`,
        which counts from 1 (0: x itself) and does not name the last one. `depth` is the number of
        layers to run (None: all).
    """
    B, L, d = x.shape
    Q = n_questions
    nv = video_bias.shape[-1]
    R = (L - nv) // Q
    config = model.config.text_config
    heads = config.num_attention_heads
    H = config.num_key_value_heads
    D = d // heads
    G = heads // H
    cos, sin = rotary
    causal = _causal(R, x.dtype)
    layers = model.model.language_model.layers
    tapped: dict[int, Tensor] = {0: x} if 0 in taps else {}
    for number, layer in enumerate(layers[:depth], 1):
        attention = layer.self_attn
        weight = torch.cat(
            [attention.q_proj.weight * D**-0.5, attention.k_proj.weight, attention.v_proj.weight]
        )
        bias = torch.cat(
            [attention.q_proj.bias * D**-0.5, attention.k_proj.bias, attention.v_proj.bias]
        )
        qkv = F.linear(normalise(x, layer.input_layernorm.weight), weight, bias).view(
            B, L, heads + 2 * H, D
        )
        turned, v = torch.split(qkv, [heads + H, H], 2)
        turned = turn_pairs(turned, cos, sin).transpose(1, 2)
        # Split instead of slicing: the gradient of a slice is as large as the whole tensor.
        q, k = torch.split(turned, [heads, H], 1)
        (video_q, own_q), (video_k, own_k), (video_v, own_v) = (
            torch.split(part, [nv, Q * R], 2) for part in (q, k, v.transpose(1, 2))
        )
        video_k = video_k.reshape(B * H, nv, D).transpose(1, 2)
        video_v = video_v.reshape(B * H, nv, D)

        over_video = torch.bmm(own_q.reshape(B * H, G * Q * R, D), video_k).view(
            B, heads, Q * R, nv
        )
        over_video = (over_video + question_bias[:, None]).view(B * H, G * Q * R, nv)
        own_q = own_q.reshape(B * H, G, Q, R, D).transpose(1, 2).reshape(B * H * Q, G * R, D)
        own_k = own_k.reshape(B * H * Q, R, D).transpose(1, 2)
        own_v = own_v.reshape(B * H * Q, R, D)
        over_own = torch.bmm(own_q, own_k).view(-1, G, R, R) + causal
        over_own = over_own.view(B * H, Q, G, R, R).transpose(1, 2).reshape(B * H, G * Q * R, R)
        video_weights, own_weights = torch.split(
            torch.cat([over_video, over_own], -1).softmax(-1), [nv, R], -1
        )
        from_video = torch.bmm(video_weights, video_v).view(B, H, G, Q, R, D)
        own_weights = (
            own_weights.reshape(B * H, G, Q, R, R).transpose(1, 2).reshape(B * H * Q, G * R, R)
        )
        from_own = torch.bmm(own_weights, own_v).view(B, H, Q, G, R, D).transpose(2, 3)
        mixed = (from_video + from_own).reshape(B, heads, Q * R, D)

        if number < len(layers):
            scores = torch.bmm(video_q.reshape(B * H, G * nv, D), video_k).view(B, heads, nv, nv)
            weights = (scores + video_bias[:, None]).softmax(-1).view(B * H, G * nv, nv)
            video_out = torch.bmm(weights, video_v).view(B, heads, nv, D)
            mixed = torch.cat([video_out, mixed], 2).transpose(1, 2).reshape(B, L, d)
        else:
            # No one reads the other tokens behind the last layer.
            x = x[:, nv:][select]
            mixed = mixed.transpose(1, 2)[select].view(-1, d)
        x = x + attention.o_proj(mixed)
        mlp = layer.mlp
        up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        gate, value = F.linear(normalise(x, layer.post_attention_layernorm.weight), up).chunk(2, -1)
        x = x + mlp.down_proj(F.silu(gate) * value)
        if number in taps:
            tapped[number] = x
    if number < len(layers):
        x = x[:, nv:][select]
    return normalise(x, model.model.language_model.norm.weight), tapped


def read_questions(
    model: Qwen2_5_VLForConditionalGeneration,
    tokens: VisualTokens,
    questions: Tensor,
    select: Tensor,
    taps: Collection[int] = (),
    depth: int | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return logits `[n, vocabulary]` at the question tokens that `select` marks, and the tapped
    states.

    `questions` (ids) and `select` are `[B, Q, R]`; `taps` and `depth` as in `run_language`.
    """
    B, Q, R = questions.shape
    embed = model.model.language_model.embed_tokens
    dtype = embed.weight.dtype
    video_bias, question_bias = make_masks(tokens, dtype)
    rotary = make_rotary_tables(model, make_positions(tokens, Q, R))
    prefix = embed(torch.tensor(PREFIX)).expand(B, -1, -1)
    shown = tokens.features.to(dtype)
    if tokens.ids is not None:
        shown = torch.where(tokens.ids[..., None] < 0, shown, embed(tokens.ids.clamp(min=0)))
    x = torch.cat([prefix, shown, embed(questions.view(B, Q * R))], 1)
    hidden, tapped = run_language(
        model, x, rotary, Q, video_bias, question_bias, select.view(B, Q * R), taps, depth
    )
    return F.linear(hidden, embed.weight), tapped


def compute_logits(
    model: Qwen2_5_VLForConditionalGeneration,
    tokens: VisualTokens,
    questions: Tensor,
    select: Tensor,
) -> Tensor:
    """Return only the logits of `read_questions`."""
    return read_questions(model, tokens, questions, select)[0]
