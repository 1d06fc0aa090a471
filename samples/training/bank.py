"""The clip bank: tens of thousands of short clips, encoded once by the frozen vision tower and kept
as features.

The tower encodes each step by itself. So a training video composed of stored steps equals a
rendered one, and the long stages spend almost no time on rendering and vision.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samples.seeds import TRAINING_STREAM
from samples.training.clips import DENSE, EMPTY, OVERLAPPING, SIMULTANEOUS, SINGLE, make_clip
from samples.training.forward import encode_steps, to_patches
from samples.training.model import TOKENS, make_model

COUNTS: Mapping[int, int] = {
    SINGLE: 18000,
    OVERLAPPING: 8000,
    SIMULTANEOUS: 5000,
    EMPTY: 2400,
    DENSE: 12000,
}
"""Clips of each kind in a full bank."""


@dataclass(frozen=True, slots=True)
class Bank:
    """The features and labels of all clips, stacked.

    Attributes:
        features: `[N, 9 * hidden]` bfloat16, one row a step.
        lit: `[N, 9]` bool, the cells that hold an object.
        first, length, kind: `[C]` int64, first row, number of steps and kind of each clip.
        event_of: `[C + 1]` int64; clip c has the events event_of[c] : event_of[c + 1].
        events: `[E, 5]` int64: shape, colour, place, first step and end step, counted from the
            start of the clip.
    """

    features: Tensor
    lit: NDArray[np.bool_]
    first: NDArray[np.int64]
    length: NDArray[np.int64]
    kind: NDArray[np.int64]
    event_of: NDArray[np.int64]
    events: NDArray[np.int64]

    def of_kind(self, kind: int) -> NDArray[np.int64]:
        """Return the indices of the clips of one kind."""
        return np.flatnonzero(self.kind == kind)

    def features_at(self, rows: NDArray[np.int64], cells: NDArray[np.int64]) -> Tensor:
        """Return the features `[..., hidden]` of single cells `[...]` of rows `[...]`."""
        lines = self.features.view(self.lit.size, -1)
        return lines[torch.from_numpy(rows * self.lit.shape[1] + cells)]

    def tensors(self) -> dict[str, Tensor]:
        """Return the bank as named tensors."""
        arrays = {
            name: getattr(self, name)
            for name in ("lit", "first", "length", "kind", "event_of", "events")
        }
        return {"features": self.features} | {k: torch.from_numpy(v) for k, v in arrays.items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> Bank:
        """Make a bank from the result of `tensors`."""
        return Bank(
            tensors["features"],
            *(tensors[k].numpy() for k in ("lit", "first", "length", "kind", "event_of", "events")),
        )


@torch.no_grad()
def _part(
    job: tuple[int, int, int], *, state: dict[str, NDArray[np.float32]], size: dict[str, int]
) -> dict[str, Any]:
    """Make `n` clips of one kind with their features; runs in a worker process."""
    seed, kind, n = job
    torch.set_num_threads(1)
    visual = make_model(0, **size).model.visual
    visual.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()})
    visual.to(torch.bfloat16).eval()
    rng = np.random.default_rng([seed, TRAINING_STREAM, kind])
    features = []
    lit = []
    lengths = []
    n_events = []
    events = []
    waiting: list[NDArray[np.uint8]] = []
    for i in range(n):
        clip = make_clip(rng, kind)
        L = len(clip.frames)
        cells = np.zeros((L, TOKENS), np.bool_)
        for event in clip.events:
            begin = int(event.start_s)
            end = int(event.end_s)
            cells[begin:end, event.place] = True
            events.append((event.shape, event.colour, event.place, begin, end))
        lit.append(cells)
        lengths.append(L)
        n_events.append(len(clip.events))
        waiting.append(clip.frames)
        if i + 1 == n or len(waiting) == 96:
            frames = torch.from_numpy(np.concatenate(waiting))
            seen = encode_steps(visual, to_patches(frames, torch.bfloat16))
            # numpy has no bfloat16, so the bits are sent to the parent process as int16.
            features.append(seen.reshape(len(frames), -1).view(torch.int16).numpy())
            waiting = []
    return {
        "features": np.concatenate(features),
        "lit": np.concatenate(lit),
        "lengths": lengths,
        "kind": kind,
        "n_events": n_events,
        "events": np.array(events, np.int64).reshape(-1, 5),
    }


def build_bank(
    visual_state: Mapping[str, Tensor],
    seed: int,
    *,
    counts: Mapping[int, int] = COUNTS,
    layers: int = 4,
    hidden: int = 128,
    processes: int = 2,
) -> Bank:
    """Render and encode `counts` clips of each kind; the result depends on the seed, not on the
    number of processes.
    """
    pieces = 4
    jobs = [
        (seed * pieces + piece, kind, n // pieces + (piece < n % pieces))
        for kind, n in counts.items()
        for piece in range(pieces)
    ]
    state = {k: v.float().numpy() for k, v in visual_state.items()}
    work = partial(_part, state=state, size={"layers": layers, "hidden": hidden})
    if processes > 1:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            parts = pool.map(work, jobs, chunksize=1)
    else:
        parts = [work(job) for job in jobs]
    lengths = np.array([n for p in parts for n in p["lengths"]], np.int64)
    n_events = np.array([n for p in parts for n in p["n_events"]], np.int64)
    return Bank(
        features=torch.from_numpy(np.concatenate([p["features"] for p in parts])).view(
            torch.bfloat16
        ),
        lit=np.concatenate([p["lit"] for p in parts]),
        first=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
        length=lengths,
        kind=np.concatenate([np.full(len(p["lengths"]), p["kind"], np.int64) for p in parts]),
        event_of=np.concatenate([[0], np.cumsum(n_events)]).astype(np.int64),
        events=np.concatenate([p["events"] for p in parts]),
    )
