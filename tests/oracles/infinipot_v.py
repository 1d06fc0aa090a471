"""The literal `InfiniPotV`: one head, one token, one recent step at a time. It shares no code with
the fast memory.

`margin` tells how close a decision was, because rounding may change a close one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape
from protokv.memories import InfiniPotVConfig


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A token of one head: key and value `[D]` float32, its place, its stream position `[P]`, its
    step.
    """

    key: Tensor
    value: Tensor
    place: tuple[float, float]
    position: Tensor
    step: int


class NaiveInfiniPotV:
    """The memory of one layer and head, without the prompt prefix.

    Attributes:
        chosen: the tokens that compressions have chosen, in stream order.
        steps: the whole steps after them.
        margin: the least difference of scores between a kept and a dropped token; tokens that are
            compared with no recent token do not count.
    """

    def __init__(self, config: InfiniPotVConfig, shape: MemoryShape, layer: int, head: int) -> None:
        self.config = config
        self.shape = shape
        self.layer = layer
        self.head = head
        self.chosen: list[Token] = []
        self.steps: list[list[Token]] = []
        self.margin = float("inf")

    @property
    def held(self) -> list[Token]:
        """Return all tokens in stream order."""
        return self.chosen + [token for step in self.steps for token in step]

    def append(self, step: StepKV) -> None:
        """Take one step."""
        keys = step.keys[self.layer, self.head].float()
        values = step.values[self.layer, self.head].float()
        tokens = [
            Token(key, value, (float(x), float(y)), position, step.step)
            for key, value, (x, y), position in zip(
                keys, values, step.coordinates, step.positions, strict=True
            )
        ][-self.config.budget :]
        if len(self.held) + len(tokens) > self.config.budget:
            self._compress(min(self.config.compressed_tokens, self.config.budget - len(tokens)))
        self.steps.append(tokens)

    def _compress(self, keep: int) -> None:
        held = self.held
        recent: list[list[Token]] = []
        for step in reversed(self.steps):
            together = len(step) + sum(map(len, recent))
            if together > keep or (recent and together > int(self.config.recent_share * len(held))):
                break
            recent.insert(0, step)
        n_recent = sum(map(len, recent))
        older = held[: len(held) - n_recent]
        by_norm = round((1 - self.config.redundancy_share) * keep)
        cosines = {token: _cosines(token, recent) for token in older}
        kept = self._best(
            older,
            keep - by_norm - n_recent,
            lambda token: -sum(cosines[token]) / len(cosines[token]) if cosines[token] else 0.0,
            lambda token: bool(cosines[token]),
        )
        others = [token for token in older if token not in kept]
        kept |= self._best(
            others,
            keep - n_recent - len(kept),
            lambda token: float(token.value.norm()),
            lambda _: True,
        )
        self.chosen = [token for token in older if token in kept]
        self.steps = recent

    def _best(
        self,
        tokens: list[Token],
        n: int,
        score: Callable[[Token], float],
        compared: Callable[[Token], bool],
    ) -> set[Token]:
        """Return the n tokens with the highest scores; of equal ones the newer."""
        ranked = sorted(enumerate(tokens), key=lambda item: (score(item[1]), item[0]), reverse=True)
        best = [token for _, token in ranked[: max(n, 0)]]
        for (_, last), (_, first_out) in (
            list(pairwise(ranked))[len(best) - 1 : len(best)] if best else []
        ):
            if compared(last) or compared(first_out):
                self.margin = min(self.margin, score(last) - score(first_out))
        return set(best)


def _cosines(token: Token, recent: list[list[Token]]) -> list[float]:
    """Return the cosine similarity to every recent token at the same place."""
    there = [other for step in recent for other in step if other.place == token.place]
    return [float(token.key @ other.key / (token.key.norm() * other.key.norm())) for other in there]
