"""A backbone without a model: it counts, keeps and says things, at once, where what a model says is
not the point.

Its keys are the mean colours of a step's cells, nothing is rotated, and an answer is a walk through
its words that begins with the question. Tests of answers, loading and logits use the real tiny
models of `tests.backbones.tiny`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protokv.core.attention import TokenCache
from protokv.core.backbone import Backbone, BackboneIdentity, PreparedStep
from protokv.core.step import StepPositions, StepTokens
from protokv.errors import ConfigError

WORDS = ("red", "green", "blue", "star", "ring", "left", "right", "<end>")
GRID = (2, 3)


class MockBackbone(Backbone):
    """Two layers, one head of four components, one position a step."""

    layers = 2
    kv_heads = 1
    head_size = 4
    position_components = 1
    frames_per_step = 2
    default_fps = 2.0
    stop_ids = frozenset({WORDS.index("<end>")})
    dtype = torch.float32
    device = torch.device("cpu")
    settings: dict[str, Any] = {"cells": GRID[0] * GRID[1]}  # noqa: RUF012
    prefix_ids = [0, 1, 2]  # noqa: RUF012

    def __init__(self, name: str = "mock", **_: object) -> None:
        self.identity = BackboneIdentity(name, "mock", "0", "float32", "0")

    @classmethod
    def load(cls, path: str, name: str, config: Any, placement: Any) -> MockBackbone:
        raise NotImplementedError

    def suffix_ids(self, question: str, turns: Sequence[Any] = ()) -> list[int]:
        if not question.strip():
            raise ConfigError("the question is empty")
        return [sum(map(ord, word)) % (len(WORDS) - 1) for word in question.split()]

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(word) for word in text.lower().split()]

    def words_ids(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {WORDS[i]}" for i in ids)

    def embed_text(self, ids: list[int]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(ids) % 4, 4).float()

    def embed_token(self, token: Tensor) -> Tensor:
        return self.embed_text(token.tolist())

    def prepare(self, images: np.ndarray[Any, Any]) -> PreparedStep:
        frames, height, width, _ = images.shape
        rows, columns = GRID
        y = height // rows
        x = width // columns
        cells = images[:, : y * rows, : x * columns].reshape(frames, rows, y, columns, x, 3)
        colours = torch.from_numpy(cells.mean((0, 2, 4))).float().reshape(-1, 3) / 255
        return PreparedStep(torch.cat((colours, torch.ones(len(colours), 1)), 1), GRID)

    def embed_steps(
        self, steps: Sequence[PreparedStep], times_s: Sequence[float]
    ) -> list[StepTokens]:
        return [StepTokens(step.pixels, step.grid) for step in steps]

    def step_positions(
        self, tokens: StepTokens, *, origin: int, start: int, index: int, time_s: float
    ) -> StepPositions:
        return StepPositions(torch.full((len(tokens.embeddings), 1), start), (start,))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = (*positions.shape[:-1], self.head_size)
        return torch.ones(size), torch.zeros(size)

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        cache: TokenCache,
        *,
        steps: Sequence[StepTokens] = (),
    ) -> Tensor:
        for number, layer in enumerate(cache.memory_layers):
            layer.append(embeddings[None] + number, embeddings[None])
        return embeddings + positions

    def logits(self, hidden: Tensor) -> Tensor:
        place = hidden.sum(-1, keepdim=True).round().long() % len(WORDS)
        return torch.zeros(*hidden.shape[:-1], len(WORDS)).scatter_(-1, place, 1.0)
