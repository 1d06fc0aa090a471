"""Two layers in front that bind names to shapes, with weights that do so from the start.

In the first, every token looks two tokens back; if a shape word stands there, as before the name in
a caption, the token takes up a code of the shape. In the second, the name in a question looks for
the same name in a caption and becomes the word of its shape, which the layers behind it know how to
ask about; and a shape word looks for a name with the code of its shape and takes up that name.
Readings are fitted to the embeddings. Knows no losses and no stages.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from samples.training.forward import normalise
from samples.training.surgery import look_back
from samples.training.time_surgery import fit
from samples.training.vocabulary import token_ids
from samples.worlds.pictures import SHAPES
from samples.worlds.speech import NAMES

BINDING_LAYER: Final = 0
NAMING_LAYER: Final = 1

_BACK: Final = 2
_SLOW: Final = (11, 12, 13, 14, 15, 27, 28, 29, 30, 31)
"""Dimensions of a head of 32 that hardly turn within the thousand positions between a caption and a
question.
"""

_CODE: Final = 1.5
_SAME = 16.0
_BOUND = 8.0
_OF_SHAPE = 20.0
_SINK = 5.0
"""The size of a code, and attention scores: of the same name, of a name with a code, of the code of
a shape, and of the first token, which has nothing to tell."""

_GAIN: Final = 1.6
"""Fitted readings are too small, and some attention goes elsewhere: without this a name moves .6 of
its way.
"""


@torch.no_grad()
def bind_names(model: Qwen2_5_VLForConditionalGeneration, seen: Tensor) -> None:
    """Set both layers; `seen` `[n, hidden]` are features of visual tokens, which must not be taken
    for words.
    """
    language = model.model.language_model
    words = language.embed_tokens.weight
    hidden = words.shape[1]
    n = len(SHAPES)
    ids = token_ids("words")
    shapes, names = ([ids[word.lower()] for word in some] for some in (SHAPES, NAMES))
    told = torch.zeros(len(words), 2 * n + 1)
    told[shapes, range(n)] = told[names, range(n, 2 * n)] = 1
    told[ids["<|im_start|>"], 2 * n] = 1
    states = torch.cat([normalise(words), normalise(seen.float())])
    # Directions that neither words nor pictures use.
    code = torch.linalg.eigh(states.T @ states)[1][:, :n].T
    states = torch.cat([states, normalise(words[names] + _CODE * code)])
    told = torch.cat([told, torch.zeros(len(seen), told.shape[1]), told[names]])
    of_shape, of_name, of_first = torch.split(fit(states, told, 0.03), [n, n, 1], 1)
    bound = torch.zeros(len(states), n)
    bound[-n:] = torch.eye(n)
    of_code = fit(states, bound, 0.03)

    look_back(model, BINDING_LAYER, (_BACK,))
    attention = language.layers[BINDING_LAYER].self_attn
    D = attention.head_dim
    groups = model.config.text_config.num_key_value_heads
    for line in (attention.v_proj, attention.o_proj):
        torch.nn.init.zeros_(line.weight)
    for group in range(groups):
        _set(attention.v_proj, group * D, of_shape)
    heads = len(attention.q_proj.bias) // D
    for head in range(heads):
        attention.o_proj.weight[:, head * D : head * D + n] = _CODE / heads * code.T

    attention = language.layers[NAMING_LAYER].self_attn
    for line in (attention.q_proj, attention.k_proj, attention.v_proj):
        torch.nn.init.zeros_(line.weight)
        torch.nn.init.zeros_(line.bias)
    torch.nn.init.zeros_(attention.o_proj.weight)
    always = torch.zeros(hidden + 1, 1)
    always[-1] = 1
    scale = D**0.5
    is_name = of_name.sum(1, keepdim=True)
    has_code = of_code.sum(1, keepdim=True)
    asks = ((_SAME, of_name, of_name), (_BOUND, is_name, has_code), (_SINK, always, of_first))
    _match(attention, 0, heads // groups, scale, asks)
    _match(
        attention,
        1,
        heads // groups,
        scale,
        ((_OF_SHAPE, of_shape, of_code), (_SINK, always, of_first)),
    )
    _set(attention.v_proj, 0, torch.cat([of_code, of_name], 1))
    _set(attention.v_proj, D, of_name)
    # Words that training never used are all alike but for their noise.
    plain = words[names].mean(0)
    each = heads // groups
    turned = _GAIN / each * torch.cat([words[shapes] - plain, plain - words[names]]).T
    for head in range(each):
        attention.o_proj.weight[:, head * D : head * D + 2 * n] = turned
        other = (each + head) * D
        attention.o_proj.weight[:, other : other + n] = -turned[:, n:]


def _set(line: torch.nn.Linear, first: int, reading: Tensor) -> None:
    """Let the outputs from `first` on be a reading `[hidden + 1, K]`, whose last row is a
    constant.
    """
    last = first + reading.shape[1]
    line.weight[first:last], line.bias[first:last] = reading[:-1].T, reading[-1]


def _match(
    attention: torch.nn.Module,
    group: int,
    each: int,
    scale: float,
    asks: tuple[tuple[float, Tensor, Tensor], ...],
) -> None:
    """Let the heads of a group score tokens by products of readings, on the dimensions that hardly
    turn.
    """
    D = attention.head_dim
    asked, told = (
        torch.cat([(score * scale) ** 0.5 * pair[side] for score, *pair in asks], 1)
        for side in (0, 1)
    )
    for line, reading, places in (
        (attention.q_proj, asked, range(group * each * D, (group + 1) * each * D, D)),
        (attention.k_proj, told, (group * D,)),
    ):
        for first in places:
            rows = [first + i for i in _SLOW[: reading.shape[1]]]
            line.weight[rows], line.bias[rows] = reading[:-1].T, reading[-1]
