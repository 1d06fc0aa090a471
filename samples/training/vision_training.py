"""The first stage: train the vision tower on dense labels, without the language model.

Every merged token (one cell of the frame) predicts its shape, colour and cell through a linear
head, which is not kept. Then the tower is frozen. Without this stage the model does not learn to
distinguish shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samples.training.clips import make_dense_step
from samples.training.forward import encode_steps, to_patches
from samples.training.optimizer import MasterAdamW

BATCH = 96


class _DenseSteps(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches of dense steps, fixed by the seed and made in a worker process."""

    def __init__(self, seed: int, batch: int) -> None:
        self.seed = seed
        self.batch = batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rng = np.random.default_rng([self.seed, 10])
        while True:
            made = [make_dense_step(rng) for _ in range(self.batch)]
            frames = torch.from_numpy(np.stack([frame for frame, _ in made]))
            yield frames, torch.from_numpy(np.stack([label for _, label in made]))


def train_vision(
    visual: Any,
    seed: int,
    steps: int,
    say: Callable[[dict[str, Any]], None],
    batch: int = BATCH,
    workers: int = 1,
) -> None:
    """Train the tower `visual` (float32 in, float32 out) for `steps` batches; `say` gets a record
    at intervals.
    """
    torch.manual_seed(seed)
    hidden = visual.config.out_hidden_size
    head = torch.nn.Linear(hidden, 27)
    both = torch.nn.ModuleDict({"visual": visual, "head": head})
    optimizer = MasterAdamW(both.named_parameters())
    loader = torch.utils.data.DataLoader(
        _DenseSteps(seed, batch), batch_size=None, num_workers=workers
    )
    cell = torch.arange(9).repeat(batch)
    batches = iter(loader)
    totals = torch.zeros(4)
    every = 100
    for step in range(steps):
        frames, labels = next(batches)
        shape, colour = labels.view(-1, 2).unbind(1)
        guess = (
            head(encode_steps(visual, to_patches(frames, torch.bfloat16))).float().view(-1, 3, 9)
        )
        loss = (
            F.cross_entropy(guess[:, 0], shape)
            + F.cross_entropy(guess[:, 1], colour)
            + F.cross_entropy(guess[:, 2], cell)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        rate = (
            3e-3
            * min(1.0, (step + 1) / 100)
            * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        )
        optimizer.step(rate)
        there = shape > 0
        right = guess.detach().argmax(-1)
        totals += torch.tensor(
            [
                loss.item(),
                (right[there, 0] == shape[there]).float().mean().item(),
                (right[there, 1] == colour[there]).float().mean().item(),
                (right[~there, 0] == 0).float().mean().item(),
            ]
        )
        if (step + 1) % every == 0 or step + 1 == steps:
            n = (step % every) + 1
            names = ("loss", "shape", "colour", "empty")
            say(
                {"stage": "vision", "step": step + 1}
                | {k: round(v / n, 4) for k, v in zip(names, totals.tolist(), strict=True)}
            )
            totals.zero_()
    visual.float()
    with torch.no_grad():
        for name, parameter in visual.named_parameters():
            parameter.copy_(optimizer.masters[f"visual.{name}"])
