"""Visual tokens of training videos: the tokens shown, their times and cells, and the masks over
them.

A video may leave out tokens. A token that stands for n equal ones has a bias of log(n), since n
equal keys of score s weigh as much as one of score s + log(n). Makes positions and masks; has no
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from samples.training.model import TOKENS
from samples.training.vocabulary import encode

PREFIX: Final = tuple(encode("<|im_start|> user <|vision_start|>"))
"""Token ids in front of the video."""

N_PREFIX: Final = len(PREFIX)
COLUMNS: Final = 3

HIDDEN: Final = -30000.0
"""Added to a masked score; finite, so that a fully masked row gives no NaN in bfloat16."""


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """The visual tokens of B videos, N each; a token attends to those before it.

    Attributes:
        features: `[B, N, hidden]`.
        times, cells: `[B, N]` int64, the step of each token (gaps and shifts allowed) and its cell,
            row by row.
        end: `[B]` int64, the first step after the video.
        window: visual tokens see the last `window` steps only (None: all).
        far: `[B, N]` bool, older tokens that they see too.
        seen: `[B, N]` bool, tokens that the questions see (None: all).
        present: `[B, N]` bool, false for padding, which stands at the end (None: no padding).
        bias: `[B, N]`, added to every score of a token as a key (None: 0).
        ids: `[B, N]` int64, the word that a token is, and -1 for visual ones (None: all are
            visual).
        positions: `[3, B, N]` int64, if they do not follow from times and cells; `end` is then the
            position of the questions, counted as times are.
    """

    features: Tensor
    times: Tensor
    cells: Tensor
    end: Tensor
    window: int | None = None
    far: Tensor | None = None
    seen: Tensor | None = None
    present: Tensor | None = None
    bias: Tensor | None = None
    ids: Tensor | None = None
    positions: Tensor | None = None


def show_whole_steps(features: Tensor, times: Tensor, end: Tensor, **masks: Any) -> VisualTokens:
    """Show all cells of the steps `times` `[B, K]`; features `[B, 9K, hidden]`, `masks` as in
    `VisualTokens`.
    """
    B, K = times.shape
    return VisualTokens(
        features,
        times.repeat_interleave(TOKENS, 1),
        torch.arange(TOKENS).repeat(K).expand(B, -1),
        end,
        **masks,
    )


def make_positions(tokens: VisualTokens, n_questions: int, question_tokens: int) -> Tensor:
    """Return stream positions `[3, B, L]` of prefix, video and questions.

    Every question starts at the largest position of the video plus one.
    """
    B = tokens.times.shape[0]
    rows = tokens.cells // COLUMNS
    columns = tokens.cells % COLUMNS
    video = (
        torch.stack([tokens.times, rows, columns]) + N_PREFIX
        if tokens.positions is None
        else tokens.positions
    )
    prefix = torch.arange(N_PREFIX).expand(3, B, N_PREFIX)
    start = N_PREFIX + tokens.end.clamp(min=COLUMNS)
    block = start[:, None, None] + torch.arange(question_tokens)
    text = block.expand(B, n_questions, question_tokens).reshape(1, B, -1).expand(3, -1, -1)
    return torch.cat([prefix, video, text], 2)


def make_masks(tokens: VisualTokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return score biases of visual tokens `[B or 1, nv, nv]` and of questions `[B, 1, nv]`; nv =
    prefix + N.
    """
    B, N = tokens.times.shape
    nv = N_PREFIX + N
    visible = torch.ones(1, nv, nv, dtype=torch.bool).tril()
    if tokens.window is not None:
        near = (tokens.times[:, :, None] - tokens.times[:, None, :]) < tokens.window
        if tokens.far is not None:
            near = near | tokens.far[:, None, :]
        visible = visible.repeat(B, 1, 1)
        visible[:, N_PREFIX:, N_PREFIX:] &= near
    elif tokens.present is not None or tokens.bias is not None:
        visible = visible.repeat(B, 1, 1)
    if tokens.present is not None:
        visible[:, N_PREFIX:, N_PREFIX:] &= tokens.present[:, None, :]
    video_bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, HIDDEN)
    question_bias = torch.zeros(B, 1, nv, dtype=dtype)
    for shown in (tokens.seen, tokens.present):
        if shown is not None:
            question_bias[:, 0, N_PREFIX:].masked_fill_(~shown, HIDDEN)
    if tokens.bias is not None:
        mass = tokens.bias.to(dtype)[:, None, :]
        video_bias[:, :, N_PREFIX:] += mass
        question_bias[:, :, N_PREFIX:] += mass
    return video_bias, question_bias
