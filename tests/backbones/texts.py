"""Steps of text, and a cache that watches them in a model of transformers."""

from typing import Any

import torch
from torch import Tensor

import protokv


def texts(count: int, each: int = 10, seed: int = 1, words: int = 32) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(8, 8 + words, (1, each), generator=g) for _ in range(count)]


@torch.no_grad()
def watch(model: Any, cache: protokv.Cache, steps: list[Tensor]) -> Tensor:
    """Forward and commit steps of text; return their logits."""
    found = []
    for ids in steps:
        found.append(model(**cache.step({"input_ids": ids})).logits[0])
        cache.commit()
    return torch.cat(found)
