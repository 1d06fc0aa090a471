"""`RepeatWeights`: tokens leave the near window with the right weights, in the order of the
stream.
"""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.bank import FarTokens, PrototypeBank
from protokv.core.near import NearWindow
from protokv.core.slots import KVSlots
from protokv.memories.durable.repeats import RepeatWeights
from tests.core.streams import World, shape_of
from tests.oracles.durable import weigh


@given(
    window=st.integers(0, 11),
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=12),
    still=st.sampled_from([0.3, 0.9, 1.0]),
    dropped=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_token_weighs_nothing_if_it_repeats_the_step_before_and_two_or_four_if_it_is_repeated(
    window: int, lengths: list[int], still: float, dropped: int, dtype: torch.dtype
) -> None:
    shape = shape_of(heads=2, dtype=dtype)
    world = World(shape, window, still=still)
    slots = KVSlots(shape, far=0, near=window)
    near = NearWindow(slots, 1)
    repeats = RepeatWeights(window, shape)
    bank = PrototypeBank(shape, 1)
    # What each token weighs; of the newest step, the positions, values in the first layer and
    # places in the window.
    weights: dict[int, int] = {}
    newest: list[tuple[int, Tensor]] = []
    absorbed = opened = 0
    for index, tokens in enumerate(lengths):
        step = world.step(index, tokens)
        usable = torch.arange(tokens) != dropped
        step = replace(step, usable=usable)
        seen = torch.cat((step.values[0].float().movedim(1, 0).flatten(1), step.coordinates), 1)
        now = list(zip(step.positions[:, 0].tolist(), seen, usable.tolist(), strict=True))
        for place, (position, features, is_usable) in enumerate(reversed(now), 1):
            weights[position] = int(is_usable)
            if place <= len(newest) and is_usable and torch.equal(features, newest[-place][1]):
                weights[position] = 0
                before = newest[-place][0]
                weights[before] = 4 if weights[before] else 0
        newest = [
            (position, features if is_usable else features * torch.nan)
            for position, features, is_usable in now
        ]
        newest = newest[len(newest) - min(len(newest), window) :]
        repeats.see_(near.newest(), step)
        plan = near.plan(index, tokens)
        near.begin(plan.key, torch.tensor(plan.numbers))
        left = near.leaving(step)
        near.write(step)
        places = left.coordinates, left.positions.double()
        far = FarTokens(
            left.keys.flatten(0, 1), left.values.flatten(0, 1), *places, left.usable.long()
        )
        mass = repeats.weigh_(far, bank).mass.tolist()
        assert mass == weigh(
            [weights[position] for position in left.positions[:, 0].tolist()], opened, absorbed
        )
        opened += sum(weight > 0 for weight in mass)
        bank.opened.fill_(opened)
        absorbed += sum(
            is_usable and not weight
            for is_usable, weight in zip(left.usable.tolist(), mass, strict=True)
        )
        assert (bank.absorbed == absorbed).all()
        # A state that is saved here goes on as this one does.
        state = repeats.live_tensors() | near.live_tensors()
        repeats = RepeatWeights(window, shape)
        repeats.take(state)
