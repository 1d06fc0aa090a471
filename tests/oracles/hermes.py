"""The literal `Hermes`: one layer, one token, one query at a time. It shares no code with the fast
memory.

`margin` tells how close a decision was, because rounding may change a close one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.core.rotary import Rotary, rotate, unrotate
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape
from protokv.memories import HermesConfig


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A token of one layer: keys and values `[H, D]` float32, its stream position `[P]`, its place
    `[2]`, its step.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    place: Tensor
    step: int


class NaiveHermes:
    """The memory of all layers.

    Attributes:
        held: of each layer, its tokens in stream order.
        newest: tokens of the newest step among them.
        margin: the least difference of scores between a kept and a dropped token.
    """

    def __init__(
        self, config: HermesConfig, shape: MemoryShape, rotary: Rotary, sink: Tensor
    ) -> None:
        """Start empty, after the prompt keys `[L, H, P0, D]`."""
        self.config = config
        self.shape = shape
        self.rotary = rotary
        self.sink = sink.float()
        self.held: list[list[Token]] = [[] for _ in range(shape.layers)]
        self.newest = 0
        self.margin = math.inf

    def append(self, step: StepKV, queries: Sequence[Tensor] | None) -> None:
        """Take one step. `queries` `[L, Hq, t, D]` are those of the shallow, middle and deep probe,
        if any.
        """
        M = self.config.budget
        n_step = len(step.positions)
        T = min(n_step, M)
        if len(self.held[0]) + T > M:
            self._compress(queries, T)
        for layer, held in enumerate(self.held):
            for i in range(n_step - T, n_step):
                keys = step.keys[layer, :, i].float()
                values = step.values[layer, :, i].float()
                held.append(Token(keys, values, step.positions[i], step.coordinates[i], step.step))
        self.newest = T

    def _compress(self, queries: Sequence[Tensor] | None, T: int) -> None:
        L = self.shape.layers
        n = len(self.held[0])
        keep = max(
            0, min(int(self.config.kept_share * self.config.budget + 1e-9), self.config.budget - T)
        )
        newest = self.newest if self.newest <= keep else 0
        first = int(L * self.config.shallow_share)
        last = int(L * (1 - self.config.deep_share))
        scores: list[list[float]] = []
        for layer in range(L):
            if layer < first:
                band = 0
                alpha = 1.0
                k = 20.0
            elif layer >= last:
                band = 2
                alpha = 0.0
                k = 20.0
            else:
                progress = (layer - first) / (last - first)
                band = 1
                alpha = 1.0 - 0.9 * progress
                k = 20.0 - 19.5 * progress
            recency = _spread([math.exp(-k * (n - 1 - i) / max(n - 1, 1)) for i in range(n)])
            if queries is None:
                scores.append(recency)
                continue
            seen = _spread(self._attention(layer, queries[band][layer]))
            scores.append([alpha * r + (1 - alpha) * a for r, a in zip(recency, seen, strict=True)])
        for layer in range(L - 2, -1, -1):
            share = 0.1 if layer < first else 0.4 if layer >= last else 0.3
            pairs = zip(scores[layer], scores[layer + 1], strict=True)
            scores[layer] = [(1 - share) * own + share * above for own, above in pairs]
        for layer in range(L):
            self.held[layer] = self._choose(
                layer, scores[layer], keep - newest, newest, deep=layer >= last
            )

    def _attention(self, layer: int, queries: Tensor) -> list[float]:
        """Return the mean attention of heads and tokens to held tokens; prefix tokens share the
        softmax.
        """
        held, (Hq, t, D) = self.held[layer], queries.shape
        group = Hq // self.shape.kv_heads
        total = [0.0] * len(held)
        for head in range(Hq):
            own = head // group
            keys = [*self.sink[layer, own], *(token.keys[own] for token in held)]
            for i in range(t):
                query = queries[head, i].double()
                logits = torch.stack([query @ key.double() / D**0.5 for key in keys])
                weights = logits.softmax(0).tolist()[len(self.sink[layer, own]) :]
                total = [sum_ + weight for sum_, weight in zip(total, weights, strict=True)]
        return [value / (Hq * t) for value in total]

    def _choose(
        self, layer: int, scores: list[float], room: int, newest: int, *, deep: bool
    ) -> list[Token]:
        held = self.held[layer]
        older = held[: len(held) - newest]
        whole = held[len(held) - newest :]
        take = room - 1 if deep and room else room
        ranked = sorted(range(len(older)), key=lambda i: (scores[i], i), reverse=True)
        chosen = set(ranked[:take])
        if 0 < take < len(ranked):
            self.margin = min(self.margin, scores[ranked[take - 1]] - scores[ranked[take]])
        if deep and room:
            dropped = [i for i in range(len(older)) if i not in chosen]
            older[dropped[-1]] = self._mean([older[i] for i in dropped])
            chosen.add(dropped[-1])
        return [older[i] for i in sorted(chosen)] + whole

    def _mean(self, tokens: list[Token]) -> Token:
        last = tokens[-1]
        there = self.rotary(last.position)
        keys = [
            rotate(unrotate(token.keys, self.rotary(token.position)), there) for token in tokens
        ]
        values = [token.values for token in tokens]
        places = [token.place for token in tokens]
        mean_keys, mean_values, place = (
            torch.stack(some).sum(0) / len(tokens) for some in (keys, values, places)
        )
        return Token(mean_keys, mean_values, last.position, place, last.step)


def _spread(values: list[float]) -> list[float]:
    low = min(values)
    high = max(values)
    return [(value - low) / (high - low + 1e-6) for value in values]
