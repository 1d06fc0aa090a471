"""Two further layers behind the clock, with weights that make them attend to the right tokens from
the start.

In the first, a visual token attends to the same cell one to three steps back: if no token was lit
there, its event begins now. In the second, a shape word attends to the first token of each event of
its shape, and to the first word of the prompt, the sink: more events leave less attention to the
sink. Knows no losses and no stages.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from samples.training.surgery import point_back

ONSET_LAYER: Final = 1
GATHER_LAYER: Final = 2
TIME_INSERTED: Final = (ONSET_LAYER, GATHER_LAYER)
LEAD: Final = 3
"""Distance from a shape word back to the word that makes its question one about time."""

TIME_READING_LAYER: Final = 4
"""The layer whose attention shows the evidence of an answer, behind the two new ones."""

_BACK: Final = 2
_BY_TIME: Final = (6.0, 6.0, 4.0, 4.0, 3.0, 2.0, 2.0, 1.0)
_BY_CELL: Final = 10.0
_BY_SHAPE: Final = 8.0
_SINK: Final = {ONSET_LAYER: 14.0, GATHER_LAYER: 8.0}
"""Attention scores: by the rotary pairs (fastest first) two steps back, of the same cell, of the
same shape, and of the sink. One and three steps back the score by time is at most 9 lower; at the
same step and four steps back, 18."""

UNLIT: Final = -0.75
"""Share of the sink's score that unlit tokens get; negative, since there are thousands of them."""

_NOT_FOLLOWED: Final = 3.0
"""Factor of the sink's score for a shape word that is not asked about over time."""

_CONTENT: Final = (12, 13, 14, 15, 28, 29, 30, 31)
"""Dimensions of a head of 32 that rotate by row and column, hence very little."""
_SLOW: Final = 11


def fit(x: Tensor, y: Tensor, ridge: float = 1.0) -> Tensor:
    """Fit the linear reading `[hidden + 1, K]` of y `[n, K]` from x `[n, hidden]`; its last row is
    a constant.
    """
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    found: Tensor = torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1]), x.T @ y)
    return found


def make_codes(n: int) -> Tensor:
    """Return n unit vectors `[n, n - 1]` with the largest distance from each other."""
    directions, _, _ = torch.linalg.svd(torch.eye(n) - 1 / n)
    return F.normalize(directions[:, : n - 1], dim=1)


@torch.no_grad()
def look_for_predecessors(
    attention: Any, theta: float, cells: Tensor, lit: Tensor, sink: Tensor, seed: int
) -> None:
    """Let all heads attend to earlier lit tokens of the same cell, and to the sink if there are
    none.

    Readings `[hidden + 1, K]` of normalised states: the code of a lit token's cell (K = 8), lit and
    sink (K = 1).
    """
    D = attention.head_dim
    scale = D**0.5
    half = D // 2
    query = torch.zeros(D, len(cells))
    key = torch.zeros(D, len(cells))
    for i, score in enumerate(_BY_TIME):
        angle = torch.tensor(_BACK * theta ** (-i / half))
        query[i, -1] = (score * scale) ** 0.5
        key[i, -1] = query[i, -1] * angle.cos()
        key[i + half, -1] = query[i, -1] * angle.sin()
    for i, dimension in enumerate(_CONTENT):
        query[dimension] = key[dimension] = (_BY_CELL * scale) ** 0.5 * cells[:, i]
    _look_at_sink(query, key, sink, _SINK[ONSET_LAYER] * scale, _SLOW)
    _set(attention, query, key, seed)
    for head in torch.split(torch.arange(len(attention.v_proj.bias)), D):
        attention.v_proj.weight[head[0]], attention.v_proj.bias[head[0]] = lit[:-1, 0], lit[-1, 0]


@torch.no_grad()
def look_for_events(
    attention: Any, shapes: Tensor, followed: Tensor, events: Tensor, sink: Tensor, seed: int
) -> None:
    """Let all heads attend equally to the starts of events of a shape word's shape and to the sink.

    Shape words that are not asked about over time attend to the sink alone. Readings `[hidden + 1,
    K]` of normalised states: the shape of a word and of an event that begins (K = 8), if a shape
    word is asked about over time, and the sink (K = 1). Scores do not depend on the time of an
    event.
    """
    D = attention.head_dim
    scale = D**0.5
    codes = make_codes(shapes.shape[1])
    query = torch.zeros(D, len(events))
    key = torch.zeros(D, len(events))
    for made, read in ((query, shapes), (key, events)):
        made[list(_CONTENT[:-1])] = (_BY_SHAPE * scale) ** 0.5 * (read @ codes).T
    _look_at_sink(query, key, sink, _SINK[GATHER_LAYER] * scale, _CONTENT[-1])
    query[_CONTENT[-1]] *= _NOT_FOLLOWED
    query[_CONTENT[-1]] += (
        (1 - _NOT_FOLLOWED) * (_SINK[GATHER_LAYER] * scale) ** 0.5 * followed[:, 0]
    )
    _set(attention, query, key, seed)


@torch.no_grad()
def look_at_lead(attention: Any, theta: float, group: int, seed: int) -> None:
    """Let a group of heads attend only to the token LEAD positions back, for every token."""
    D = attention.head_dim
    each = attention.num_key_value_groups
    queries = slice(group * each * D, (group + 1) * each * D)
    keys = slice(group * D, (group + 1) * D)
    for projection, rows in (
        (attention.q_proj, queries),
        (attention.k_proj, keys),
        (attention.v_proj, keys),
    ):
        projection.weight[rows], projection.bias[rows] = 0, 0
    point_back(attention, theta, group, LEAD)
    generator = torch.Generator().manual_seed(seed)
    attention.v_proj.weight[keys] = 0.06 * torch.randn(
        D, attention.v_proj.in_features, generator=generator
    )


def _look_at_sink(query: Tensor, key: Tensor, sink: Tensor, score: float, dimension: int) -> None:
    query[dimension, -1] = score**0.5
    key[dimension] = score**0.5 * sink[:, 0]


def _set(attention: Any, query: Tensor, key: Tensor, seed: int) -> None:
    """Set the same query and key `[D, hidden + 1]` in every head, and random values."""
    generator = torch.Generator().manual_seed(seed)
    for projection, made in ((attention.q_proj, query), (attention.k_proj, key)):
        heads = len(projection.bias) // len(made)
        projection.weight.copy_(made[:, :-1].repeat(heads, 1))
        projection.bias.copy_(made[:, -1].repeat(heads))
    torch.nn.init.normal_(attention.v_proj.weight, std=0.06, generator=generator)
    torch.nn.init.zeros_(attention.v_proj.bias)
