"""A backbone whose language model does nothing but attend: what a session adds to a forward is all
that it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from protokv.core.backbone import Backbone, BackboneIdentity, PreparedStep
from protokv.core.step import StepPositions, StepTokens
from tests.core.streams import PlainRotary

VOCABULARY = 50


class StubBackbone(Backbone):
    """Attention of given queries, keys and values in every layer; embeddings and logits that are
    there already.
    """

    position_components = 3
    frames_per_step = 2
    default_fps = 2.0
    stop_ids = frozenset({VOCABULARY})
    settings: dict[str, int | float | str] = {}  # noqa: RUF012

    def __init__(
        self,
        *,
        layers: int = 28,
        kv_heads: int = 4,
        groups: int = 7,
        head_size: int = 128,
        grid: tuple[int, int] = (14, 14),
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        """Of the shapes of Qwen2.5-VL-7B, where nothing else is said."""
        self.layers = layers
        self.kv_heads = kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.identity = BackboneIdentity(
            "stub", "stub", config_hash="", weights_digest="", dtype=str(dtype)[6:]
        )
        self.grid = grid
        self._heads = kv_heads * groups
        self._rotary = PlainRotary(head_size)
        self._rotary.frequency = self._rotary.frequency.to(self.device)
        self._made: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._logits = torch.zeros(VOCABULARY, device=self.device)
        self.step = StepTokens(
            torch.zeros(grid[0] * grid[1], 8, dtype=dtype, device=self.device), grid
        )

    @classmethod
    def load(cls, *_: Any) -> StubBackbone:
        raise NotImplementedError

    @property
    def prefix_ids(self) -> list[int]:
        return list(range(14))

    def suffix_ids(self, question: str, turns: Sequence[Any] = ()) -> list[int]:
        return list(range(20))

    def decode(self, ids: list[int]) -> str:
        return "x" * len(ids)

    def embed_text(self, ids: list[int]) -> Tensor:
        return self._made_for(len(ids))[3]

    def embed_token(self, token: Tensor) -> Tensor:
        return self._made_for(1)[3]

    def prepare(self, images: Any) -> PreparedStep:
        return PreparedStep(torch.empty(0), self.grid)

    def embed_steps(
        self, steps: Sequence[PreparedStep], times_s: Sequence[float]
    ) -> list[StepTokens]:
        return [self.step for _ in steps]

    def step_positions(
        self, tokens: StepTokens, *, origin: int, start: int, index: int, time_s: float
    ) -> StepPositions:
        rows, columns = self.grid
        cell = torch.arange(rows * columns, device=self.device)
        places = (
            torch.stack((torch.full_like(cell, index), cell // columns, cell % columns), 1) + origin
        )
        return StepPositions(places, (origin + index, origin + rows - 1, origin + columns - 1))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(positions.to(self.device))
        return cos.to(positions.device), sin.to(positions.device)

    def forward(self, embeddings: Tensor, positions: Tensor, cache: Any, **_: Any) -> Tensor:
        query, keys, values, hidden = self._made_for(len(positions))
        for layer in range(self.layers):
            out = cache.attend(layer, query[0], (keys[0], values[0]), self.head_size**-0.5)
            assert out.shape == (self._heads, len(positions), self.head_size)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits if hidden.ndim == 1 else self._logits.expand(len(hidden), -1)

    def _made_for(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key and value in the layout that transformers gives them, and hidden states."""
        if tokens not in self._made:
            g = torch.Generator(self.device).manual_seed(tokens)
            made = [
                torch.randn(1, tokens, heads, self.head_size, generator=g, device=self.device).to(
                    self.dtype
                )
                for heads in (self._heads, self.kv_heads, self.kv_heads)
            ]
            query, keys, values = (part.transpose(1, 2) for part in made)
            self._made[tokens] = (
                query,
                keys,
                values,
                torch.zeros(tokens, 8, dtype=self.dtype, device=self.device),
            )
        return self._made[tokens]
