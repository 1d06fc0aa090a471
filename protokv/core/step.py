"""A step, the unit of streaming: the `T` tokens that one sampled frame, or one temporal patch of
two, becomes.

The language model reads a step as `StepTokens`, at `StepPositions`; a memory takes it as `StepKV`.
`StreamClock` says where the stream stands. All are plain records: they know no model and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from protokv.errors import StateCorrupt

Images = NDArray[np.uint8]
"""Frames `[n, height, width, 3]`, RGB."""
Grid = tuple[int, int]
"""Rows and columns."""

MOST_STREAM_COUNT = 2**48
"""More than any stream has steps, tokens or positions, and so few that sums and products of two
stay in 64 bits.
"""

_StreamCount = Annotated[int, Meta(ge=0)]


class SpokenText(str):
    """What was said from `start_s` to `end_s`, in seconds from the beginning of its step."""

    __slots__ = ("end_s", "start_s")

    def __new__(cls, text: str, start_s: float, end_s: float) -> SpokenText:
        """Make a text with its times."""
        made = super().__new__(cls, text)
        made.start_s = start_s
        made.end_s = end_s
        return made

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A step as the language model reads it."""

    embeddings: Tensor  # `[T, E]`, model dtype; the visual tokens in raster order
    # rows and columns of the visual tokens, of which a memory may have selected some
    grid: Grid
    # which tokens are visual; the others are words, and text around every step, such as its time.
    # None: all are visual
    visual: slice | None = None
    # `[n, V, E]`, added to the visual tokens after each of the first `n` layers; None: the family
    # has no such features
    deepstack: Tensor | None = None
    words: int = 0  # how many of the last tokens are words
    words_text: str = ""  # these words; a `SpokenText` if it is known when they were said

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def visual_span(self) -> tuple[int, int]:
        """The first visual token, and the one after the last."""
        return (0, len(self)) if self.visual is None else (self.visual.start, self.visual.stop)

    def select(self, visual_tokens: Tensor) -> tuple[StepTokens, Tensor]:
        """Return the step with some of its visual tokens `[n]` and all of its text, and the rows
        `[m]` these were.
        """
        rows = torch.arange(len(self), device=visual_tokens.device)
        start, stop = self.visual_span
        rows = torch.cat((rows[:start], start + visual_tokens, rows[stop:]))
        selected = replace(
            self,
            embeddings=self.embeddings[rows],
            visual=slice(start, start + len(visual_tokens)),
            deepstack=None if self.deepstack is None else self.deepstack[:, visual_tokens],
        )
        return selected, rows

    def coordinates(self) -> Tensor:
        """Return the centre (x, y) of every token's cell, `[T, 2]` float32 in [0, 1]; text lies in
        the middle.
        """
        coordinates = torch.full((len(self), 2), 0.5, device=self.embeddings.device)
        coordinates[self.visual or slice(None)] = make_cell_centres(self.grid, coordinates.device)
        return coordinates


@dataclass(frozen=True, slots=True)
class StepPositions:
    """Where the tokens of a step stand in the stream."""

    positions: Tensor  # `[T, P]` int64, on the device of the model
    # the highest position of each component, known without asking the device
    highest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepKV:
    """Keys and values of one step, in raster order."""

    keys: Tensor  # `[L, H, T, D]` model dtype, rotated to their stream positions
    values: Tensor  # `[L, H, T, D]` model dtype
    positions: Tensor  # `[T, P]` int64, stream positions
    coordinates: Tensor  # `[T, 2]` float32, `(x, y)` of the cell centres in [0, 1]
    step: int  # index of the step; it increases
    # `[T]` bool, False where a number is not finite; None: not examined yet
    usable: Tensor | None = None
    words: int = 0  # how many of the last tokens are what was said in the step
    # `[T]` bool, tokens that repeat the step before; None: not looked up
    repeats: Tensor | None = None
    # `[L, Hq, T, D]` model dtype, rotated to stream positions; None: the memory does not read them
    queries: Tensor | None = None

    def usable_only(self) -> StepKV:
        """Return the step without its unusable tokens. This waits for the device."""
        return (
            self
            if self.usable is None
            else replace(self.tokens(self.usable.nonzero().squeeze(1)), usable=None)
        )

    def tokens(self, some: Tensor | slice) -> StepKV:
        """Return some of its tokens, without telling which are words."""
        usable, repeats = (
            None if held is None else held[some] for held in (self.usable, self.repeats)
        )
        return StepKV(
            self.keys[:, :, some],
            self.values[:, :, some],
            self.positions[some],
            self.coordinates[some],
            self.step,
            usable,
            repeats=repeats,
            queries=None if self.queries is None else self.queries[:, :, some],
        )


def split_steps(
    keys: Tensor,
    values: Tensor,
    places: Sequence[tuple[Tensor, Tensor, int]],
    first: int,
    queries: Tensor | None = None,
) -> list[StepKV]:
    """Return consecutive steps, numbered from `first`, of the keys and values `[L, H, T, D]` of all
    their tokens, and their queries `[L, Hq, T, D]` if the memory reads them.

    `places` are positions `[T, P]` and coordinates `[T, 2]` of each step, and how many of its last
    tokens are words.
    """
    steps = list[StepKV]()
    begin = 0
    for index, (positions, coordinates, words) in enumerate(places, first):
        tokens = len(positions)
        own_keys, own_values = (part.narrow(2, begin, tokens) for part in (keys, values))
        asked = None if queries is None else queries.narrow(2, begin, tokens)
        begin += tokens
        steps.append(
            StepKV(own_keys, own_values, positions, coordinates, index, words=words, queries=asked)
        )
    return steps


@dataclass(frozen=True, slots=True)
class StreamClock:
    """Where a stream stands. StateCorrupt: the fields contradict each other, or are beyond what a
    state can tell.
    """

    steps: _StreamCount  # steps watched; also the index of the next one
    # at the end of the last step, 0 before the first
    stream_time_s: Annotated[float, Meta(ge=0)]
    # one more than the highest rotary position in use; text starts here
    next_position: _StreamCount
    tokens_seen: _StreamCount  # tokens of the steps watched
    fps: Annotated[float, Meta(ge=1e-6, le=1e6)]  # sampled frames a second
    frames_per_step: Annotated[int, Meta(ge=1, le=1000)]  # sampled frames that make a step

    @property
    def step_seconds(self) -> float:
        """Stream time of one step."""
        return self.frames_per_step / self.fps

    @property
    def next_start_s(self) -> float:
        """Where the next step starts if it follows without a gap."""
        return self.steps * self.step_seconds

    def mean_time(self, start_s: float) -> float:
        """Return the mean stream time of the frames of a step that starts at `start_s`."""
        return start_s + (self.frames_per_step - 1) / (2 * self.fps)

    def after(self, start_s: float, tokens: int, highest: int) -> StreamClock:
        """Return where the stream stands after one more step.

        It starts at `start_s` and has so many tokens; `highest` is their highest position.
        """
        return replace(
            self,
            steps=self.steps + 1,
            stream_time_s=start_s + self.step_seconds,
            next_position=max(self.next_position, highest + 1),
            tokens_seen=self.tokens_seen + tokens,
        )

    def __post_init__(self) -> None:
        begun = self.steps > 0
        agree = (self.tokens_seen > 0) == begun == (self.stream_time_s > 0)
        most = max(self.tokens_seen, self.next_position, self.stream_time_s)
        if not (agree and self.steps <= self.tokens_seen and most < MOST_STREAM_COUNT):
            raise StateCorrupt(
                f"clock: no stream has come to {self.steps} steps, {self.tokens_seen} tokens, "
                f"position {self.next_position} and {self.stream_time_s} s"
            )


def make_cell_centres(grid: Grid, device: torch.device | None = None) -> Tensor:
    """Return (x, y) of the cells of a grid in raster order, `[rows * columns, 2]` float32 in [0,
    1].
    """
    rows, columns = grid
    y = (torch.arange(rows, dtype=torch.float32, device=device) + 0.5) / rows
    x = (torch.arange(columns, dtype=torch.float32, device=device) + 0.5) / columns
    return torch.stack((x.expand(rows, -1), y[:, None].expand(-1, columns)), -1).view(-1, 2)
