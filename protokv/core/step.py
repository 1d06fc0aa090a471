"""What a step is between a session and a memory: thinned, kept to be read afresh, and where its tokens lie.

Knows no model, no memory and no clock.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protokv.backbones.base import StepTokens
from protokv.extras.recent import RecentStep


def thinned(tokens: StepTokens, kept: Tensor) -> tuple[StepTokens, Tensor]:
    """A step of which the visual tokens `kept` are left and all of its text; and which rows of the step these are.

    Its `grid` stays that of the whole step.
    """
    every = torch.arange(len(tokens.embeddings), device=kept.device)
    start, stop, _ = (tokens.visual or slice(None)).indices(len(every))
    rows = torch.cat((every[:start], start + kept, every[stop:]))
    left = replace(
        tokens,
        embeddings=tokens.embeddings[rows],
        visual=slice(start, start + len(kept)),
        deepstack=None if tokens.deepstack is None else tokens.deepstack[:, kept],
    )
    return left, rows


def recent_step(tokens: StepTokens, positions: Tensor, step: int) -> RecentStep:
    """A step that was forwarded at some positions, as a memory keeps it."""
    start, stop, _ = (tokens.visual or slice(None)).indices(len(positions))
    return RecentStep(tokens.embeddings, positions, tokens.grid, (start, stop), step, tokens.deepstack)


def read_recent(recent: RecentStep) -> StepTokens:
    """The inverse of `recent_step`."""
    return StepTokens(recent.embeddings, recent.grid, slice(*recent.visual), recent.deepstack)


def coordinates_of(tokens: StepTokens) -> Tensor:
    """(x, y) of every token of a step, `[T, 2]` float32; text that is written around it stands in the middle."""
    coordinates = torch.full((len(tokens.embeddings), 2), 0.5, device=tokens.embeddings.device)
    coordinates[tokens.visual or slice(None)] = cell_centres(tokens.grid).to(coordinates.device)
    return coordinates


def cell_centres(grid: tuple[int, int]) -> Tensor:
    """(x, y) of every token of a step in raster order, `[T, 2]` float32 in [0, 1], independent of resolution."""
    rows, columns = grid
    y = (torch.arange(rows, dtype=torch.float32) + 0.5) / rows
    x = (torch.arange(columns, dtype=torch.float32) + 0.5) / columns
    return torch.stack([x.repeat(rows), y.repeat_interleave(columns)], dim=-1)
