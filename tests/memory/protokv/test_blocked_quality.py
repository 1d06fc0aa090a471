"""How near the blocked rule comes to exact Ward: planted events are kept, and the sum of squared errors is bounded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from protokv.config import DurableConfig
from protokv.memory.protokv.bank import PrototypeBank, Seen
from protokv.memory.protokv.policies import find_policy
from protokv.memory.protokv.policy import FarTokens
from tests.memory.streams import shape_of

# D as real heads have it: in few dimensions noise is not what it is in many.
SIDE, D, K, STEPS = 5, 128, 600, 80
T = SIDE * SIDE
EVENTS = {11: 3, 23: 17, 38: 8, 52: 21, 61: 0, 70: 12}


def scenes(kind: str) -> Iterator[Tensor]:
    """Features `[T, 2 D]` of each step: scenes that come again, with sensor noise and events of one token; or noise."""
    g = torch.Generator().manual_seed(3)
    looks = torch.randn(16, T, 2 * D, generator=g)
    for step in range(STEPS):
        features = torch.randn(T, 2 * D, generator=g)
        if kind == "scenes":
            features = looks[step // 6 * 7 % 16] + 0.15 * features
            if step in EVENTS:
                features[EVENTS[step]] = event(step)
        yield features


def event(step: int) -> Tensor:
    return torch.randn(2 * D, generator=torch.Generator().manual_seed(1000 + step))


def bank_of(rule: str, kind: str) -> tuple[PrototypeBank, float]:
    """The bank at the end, and the sum of squared distances of all tokens to the centres that they went to."""
    shape = shape_of(layers=1, heads=1, size=D)
    bank = PrototypeBank(shape, K)
    settings = DurableConfig.of("durable", budget=K, split=(0, 1), rule=rule)
    policy = find_policy(settings)(bank, settings, shape)
    cells = torch.arange(SIDE)
    coordinates = (torch.cartesian_prod(cells, cells).flip(1) + 0.5) / SIDE
    squares = 0.0
    for step, features in enumerate(scenes(kind)):
        seen = Seen(coordinates, step * T + torch.arange(T)[:, None].double())
        keys, values = features[None, :, :D].contiguous(), features[None, :, D:].contiguous()
        policy.absorb_(FarTokens(keys, values, seen), [], step)
        squares += float(features.double().square().sum())
    centers = torch.cat((bank.key_center, bank.value_center), 3).double().square().sum(3)
    return bank, squares - float((centers * bank.mass).sum())


@pytest.mark.parametrize(("kind", "most"), [("scenes", 1.1), ("noise", 1.15)])
def test_the_error_is_near_that_of_exact_ward(kind: str, most: float) -> None:
    blocked, exact = bank_of("blocked", kind)[1], bank_of("exact", kind)[1]
    assert blocked <= most * exact
    # The exact rule merges the cheapest first, and does not look ahead.
    assert blocked >= 0.8 * exact


@pytest.mark.parametrize("rule", ["blocked", "exact"])
def test_every_planted_event_keeps_a_prototype_of_its_own(rule: str) -> None:
    bank, _ = bank_of(rule, "scenes")
    centers = torch.cat((bank.key_center, bank.value_center), 3)[0, 0]
    for step in EVENTS:
        squares = (centers - event(step)).square().sum(1)
        assert float(squares.min()) < 1e-6
        assert int(bank.mass[0, 0, squares.argmin()]) == 1
