"""How near the blocked rule comes to exact Ward: planted events are kept, and the sum of squared errors is bounded.

From the smallest bank that it serves on, at few tokens a step and at as many as the models of 7B have.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from protokv.core.bank import FarTokens, PrototypeBank, TokenPositions
from protokv.memories import DurableConfig
from protokv.memories.durable.memory import Durable
from protokv.memories.durable.settings import BLOCKED_FROM
from tests.core.streams import shape_of

# D as real heads have it: in few dimensions noise is not what it is in many.
D, EVENTS = 128, 6
# Prototypes, and the side of a step's grid.
SIZES = [(BLOCKED_FROM, 5), (BLOCKED_FROM, 14), pytest.param(2048, 14, marks=pytest.mark.slow)]
sizes = pytest.mark.parametrize(("K", "side"), SIZES)


def scenes(kind: str, K: int, T: int) -> Iterator[Tensor]:
    """Features `[T, 2 D]` of each step: scenes that come again and fill two thirds of the bank, with sensor noise and
    events of one token; or noise."""
    g = torch.Generator().manual_seed(3)
    if kind == "noise":
        for _ in range(3 * K // T):
            yield torch.randn(T, 2 * D, generator=g)
        return
    looks = torch.randn(max(2, 2 * K // (3 * T)), T, 2 * D, generator=g)
    steps = 6 * len(looks)
    events = {step: number for number, step in enumerate(range(steps // 9, steps, steps // 7))}
    for step in range(steps):
        # Three steps a scene, and each twice.
        features = looks[step // 3 % len(looks)] + 0.15 * torch.randn(T, 2 * D, generator=g)
        if step in events:
            features[17 * events[step] % T] = event(events[step])
        yield features


def event(number: int) -> Tensor:
    return torch.randn(2 * D, generator=torch.Generator().manual_seed(1000 + number))


@cache
def bank_of(rule: str, kind: str, K: int, side: int) -> tuple[PrototypeBank, float]:
    """The bank at the end, and the sum of squared distances of all tokens to the centres that they went to."""
    shape = shape_of(layers=1, heads=1, size=D)
    settings = DurableConfig.of("durable", budget=K, split=(0, 1), rule=rule)
    policy_of = Durable.rule_type(settings)
    bank = PrototypeBank(shape, K, spread=policy_of.needs_spread)
    policy = policy_of(bank, settings, shape)
    cells, T = torch.arange(side), side * side
    coordinates = (torch.cartesian_prod(cells, cells).flip(1) + 0.5) / side
    squares = 0.0
    for step, features in enumerate(scenes(kind, K, T)):
        seen = TokenPositions(coordinates, step * T + torch.arange(T)[:, None].double())
        keys, values = features[None, :, :D].contiguous(), features[None, :, D:].contiguous()
        policy.absorb_(FarTokens(keys, values, seen, torch.ones(T, dtype=torch.int64)), step)
        squares += float(features.double().square().sum())
    centers = torch.cat((bank.key_center, bank.value_center), 3).double().square().sum(3)
    return bank, squares - float((centers * bank.mass).sum())


@sizes
@pytest.mark.parametrize(("kind", "most"), [("scenes", 1.1), ("noise", 1.15)])
def test_the_error_is_near_that_of_exact_ward(kind: str, most: float, K: int, side: int) -> None:
    blocked, exact = bank_of("blocked", kind, K, side)[1], bank_of("exact", kind, K, side)[1]
    assert blocked <= most * exact
    # The exact rule merges the cheapest first, and does not look ahead.
    assert blocked >= 0.8 * exact


@sizes
@pytest.mark.parametrize("rule", ["blocked", "exact"])
def test_every_planted_event_keeps_a_prototype_of_its_own(rule: str, K: int, side: int) -> None:
    bank, _ = bank_of(rule, "scenes", K, side)
    centers = torch.cat((bank.key_center, bank.value_center), 3)[0, 0]
    for number in range(EVENTS):
        squares = (centers - event(number)).square().sum(1)
        assert float(squares.min()) < 1e-6
        assert int(bank.mass[0, 0, squares.argmin()]) == 1
