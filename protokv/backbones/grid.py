"""What the Qwen families share about a step: its frames are checked, its visual tokens stand at (time, row, column)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from protokv.backbones.base import StepPositions
from protokv.records import StreamClock


def check_images(images: np.ndarray[Any, Any], frames: int) -> None:
    """Refuse what is not one step of RGB frames.

    Raises:
        ValueError: it is not `[frames, height, width, 3]` uint8 with at least one pixel.
    """
    shape = images.shape
    if images.dtype != np.uint8 or len(shape) != 4 or (shape[0], shape[3]) != (frames, 3) or 0 in shape:
        raise ValueError(f"a step is [{frames}, height, width, 3] uint8 RGB, got {list(shape)} {images.dtype}")


def place_on_grid(
    grid: tuple[int, int], origin: int, index: int, time_s: float, per_second: float | None, device: torch.device
) -> StepPositions:
    """(t, h, w) of every token of a step, each component from `origin`.

    Args:
        grid: rows and columns of its tokens.
        origin: position of the first token behind the prompt prefix.
        index: number of the step.
        time_s: stream time of its first frame.
        per_second: positions a second; None counts steps.
        device: of the positions.
    """
    # The small term undoes the rounding of sums such as 3 * 0.1; transformers truncates likewise.
    t = index if per_second is None else int(time_s * per_second + 1e-6)
    rows, columns = grid
    highest = (origin + t, origin + rows - 1, origin + columns - 1)
    return StepPositions(origin + cells(grid, t, device), highest)


def times_on_grid(positions: Tensor, origin: int, per_second: float | None, clock: StreamClock) -> Tensor:
    """The inverse of `place_on_grid`: times within the steps at `positions` `[..., 3]`, seconds, `[...]` float64.

    Times were rounded down to positions, so a step began after its position's own time and before the next one's.
    """
    t = positions[..., 0].double() - origin
    if per_second is None:
        return (t + 0.5) * clock.step_seconds
    # Late enough to be in a step that began between two positions, early enough for one that began on its own.
    return t / per_second + 0.999 * min(1 / per_second, clock.step_seconds)


def cells(grid: tuple[int, int], t: int, device: torch.device) -> Tensor:
    """(t, row, column) of every visual token in raster order, `[rows * columns, 3]` int64."""
    rows, columns = grid
    cell = torch.arange(rows * columns, device=device)
    return torch.stack([torch.full_like(cell, t), cell // columns, cell % columns], dim=-1)
