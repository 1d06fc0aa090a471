"""Batches for the clock layer, which learns the time of tokens: lit tokens at random times, then
random words.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from samples.training.batches import IGNORED, LONGEST_SHIFT
from samples.training.compose import Composer
from samples.training.links import BOUNDS, LinkLabels
from samples.training.model import TOKENS
from samples.training.order_batches import OrderBatch
from samples.training.order_curriculum import OrderStage
from samples.training.visual_tokens import N_PREFIX, VisualTokens
from samples.training.vocabulary import words

VISUAL: Final = 60
WORDS: Final = 8
LONGEST_SPAN: Final = 640
SHORTEST_SPAN: Final = 16


def make_clock_batch(rng: np.random.Generator, composer: Composer, stage: OrderStage) -> OrderBatch:
    """Make videos of 16 to 640 steps, short ones as often as long ones, each with a "question" of
    random words.
    """
    B = max(1, stage.tokens // (VISUAL + WORDS + N_PREFIX))
    bank = composer.bank
    span = np.exp(rng.uniform(math.log(SHORTEST_SPAN), math.log(LONGEST_SPAN), B))[:, None]
    times = np.sort((rng.random((B, VISUAL)) * span).astype(np.int64), 1)
    times += (rng.integers(0, LONGEST_SHIFT, B) * (rng.random(B) < stage.shift))[:, None]
    some = np.flatnonzero(bank.lit.any(1))
    rows = some[rng.integers(0, len(some), (B, VISUAL))]
    cells = np.where(
        rng.random(rows.shape) < 0.8, bank.lit[rows].argmax(-1), rng.integers(0, TOKENS, rows.shape)
    )
    tokens = VisualTokens(
        bank.features_at(rows, cells),
        torch.from_numpy(times),
        torch.from_numpy(cells),
        torch.from_numpy(times[:, -1] + 1),
    )
    ids = torch.from_numpy(rng.integers(1, len(words("order")), (B, 1, WORDS)))
    links = LinkLabels()
    for b in range(B):
        links.add("clock", b, N_PREFIX + np.arange(VISUAL), times[b, :, None] > BOUNDS)
    return OrderBatch(tokens, ids, torch.full_like(ids, IGNORED), [], links.tensors(False, False))
