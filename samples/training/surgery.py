"""Insert layers that change nothing at first into a trained model, and give time the slow rotary
pairs.

Two of six layers are new: the first one, which is the clock, and the last but one, where the second
shape word of a question finds the first. The shipped weights read content as well with fewer rotary
pairs for rows and columns. `time_surgery` inserts further layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from samples.training.model import make_config
from samples.training.vocabulary import Extent, words

SECTIONS: Final = (12, 2, 2)
"""With theta 2e4 the slowest pair of time rotates once in 5,700 steps; with (8, 4, 4), once in
480.
"""

CLOCK_LAYER: Final = 0
LOOK_BACK_LAYER: Final = 4
INSERTED: Final = (CLOCK_LAYER, LOOK_BACK_LAYER)

READING_LAYER: Final = 2
"""The layer whose attention shows the evidence of an answer: the second one before the clock was
inserted.
"""

_WORD_NOISE: Final = 0.15
"""About the root mean square of the embedding of a learned word."""

_OFFSETS: Final = (3, 4)
_FAST_PAIRS: Final = 5
_SHARPNESS: Final = 4.75


def insert_layers(
    state: Mapping[str, Tensor],
    seed: int,
    *,
    inserted: tuple[int, ...] = INSERTED,
    reading: int = READING_LAYER,
    hidden: int = 128,
) -> Qwen2_5_VLForConditionalGeneration:
    """Return the float32 model with the weights `state` and new layers at the places `inserted` of
    the new stack.

    The new layers add nothing: their o_proj and down_proj are zero. The attention of layer
    `reading` shows evidence.
    """
    layers = "model.language_model.layers."
    old = len(
        {name.removeprefix(layers).split(".")[0] for name in state if name.startswith(layers)}
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(make_config(old + len(inserted), hidden, SECTIONS))
    kept = [i for i in range(old + len(inserted)) if i not in inserted]
    model.config.protokv_reading_layers = [reading]
    moved = {}
    for name, tensor in state.items():
        if name.startswith(layers):
            number, rest = name.removeprefix(layers).split(".", 1)
            name = f"{layers}{kept[int(number)]}.{rest}"
        moved[name] = tensor
    missing, unexpected = model.load_state_dict(moved, strict=False)
    new = tuple(f"{layers}{i}." for i in inserted)
    if unexpected or any(not name.startswith((*new, "lm_head.")) for name in missing):
        raise ValueError(
            f"not the weights of a smaller model: {sorted(unexpected)}, {sorted(missing)}"
        )
    for i in inserted:
        layer = model.model.language_model.layers[i]
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    model.tie_weights()
    return model


@torch.no_grad()
def tell_words_apart(embedding: Tensor, seed: int, known_by: Extent, to_learn: Extent) -> None:
    """Add noise to the embeddings `[V, hidden]` of words to learn.

    The embeddings of words that training never used are all alike.
    """
    known = len(words(known_by))
    further = len(words(to_learn))
    generator = torch.Generator().manual_seed(seed)
    embedding[known:further] += _WORD_NOISE * torch.randn(
        further - known, embedding.shape[1], generator=generator
    )


@torch.no_grad()
def look_back(
    model: Qwen2_5_VLForConditionalGeneration,
    number: int = LOOK_BACK_LAYER,
    offsets: tuple[int, ...] = _OFFSETS,
) -> None:
    """Let each group of heads attend to the token so many positions back: 3 or 4, where the first
    shape word stands.
    """
    attention = model.model.language_model.layers[number].self_attn
    theta = model.config.text_config.rope_parameters["rope_theta"]
    for group in range(model.config.text_config.num_key_value_heads):
        point_back(attention, theta, group, offsets[group % len(offsets)])
    torch.nn.init.normal_(attention.v_proj.weight, std=0.06)


@torch.no_grad()
def point_back(attention: Any, theta: float, group: int, offset: int) -> None:
    """Let a group of heads attend to the token `offset` positions back, with the biases of its
    queries and key.

    Queries are a constant on the fastest rotary pairs, and the key is the same constant rotated by
    the offset.
    """
    D = attention.head_dim
    each = attention.num_key_value_groups
    turn = offset * theta ** (-torch.arange(_FAST_PAIRS) / (D // 2))
    query = torch.zeros(D)
    key = torch.zeros(D)
    query[:_FAST_PAIRS] = _SHARPNESS
    key[:_FAST_PAIRS] = _SHARPNESS * torch.cos(turn)
    key[D // 2 : D // 2 + _FAST_PAIRS] = _SHARPNESS * torch.sin(turn)
    attention.q_proj.bias[group * each * D : (group + 1) * each * D] = query.repeat(each)
    attention.k_proj.bias[group * D : (group + 1) * D] = key
