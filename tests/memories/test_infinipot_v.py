"""InfiniPot-V equals its literal oracle."""

from dataclasses import replace

import torch
from hypothesis import event, given
from hypothesis import strategies as st

from protokv.core.step import make_cell_centres
from protokv.core.tensors import MemoryShape
from protokv.memories import InfiniPotVConfig
from protokv.memories.infinipot_v import InfiniPotV
from tests.core.streams import World, shape_of
from tests.oracles.infinipot_v import NaiveInfiniPotV
from tests.tolerance import tolerance

# A score is a norm of up to 16 numbers, or a mean of their cosines over up to 36 recent steps.
TIE = tolerance(torch.float32, 16 + 36)


GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))


@given(
    config=st.builds(
        InfiniPotVConfig,
        budget=st.integers(1, 40),
        kept_share=st.sampled_from([0.75, 0.75, 0.0, 0.3, 1.0]),
        redundancy_share=st.sampled_from([0.5, 0.5, 0.0, 0.8, 1.0]),
        recent_share=st.sampled_from([0.25, 0.125, 0.0, 0.6, 1.0]),
    ),
    shape=st.builds(
        shape_of,
        heads=st.integers(1, 2),
        size=st.sampled_from([4, 6, 16]),
        components=st.sampled_from([1, 3]),
    ),
    runs=st.lists(st.tuples(GRIDS, st.integers(1, 8)), min_size=1, max_size=3),
    noise=st.sampled_from([0.05, 0.3, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_it_equals_its_oracle_token_for_token(
    config: InfiniPotVConfig,
    shape: MemoryShape,
    runs: list[tuple[tuple[int, int, int], int]],
    noise: float,
    seed: int,
) -> None:
    world = World(shape, seed, noise=noise)
    fast = InfiniPotV(config, shape, world.rotary)
    fast.start(*world.sink())
    naive = [
        NaiveInfiniPotV(config, shape, layer, head)
        for layer in range(2)
        for head in range(shape.kv_heads)
    ]
    for index, (rows, columns, text) in enumerate(
        grid for grid, times in runs for _ in range(times)
    ):
        # Text stands in the middle of the frame.
        places = torch.cat((torch.full((text, 2), 0.5), make_cell_centres((rows, columns))))
        step = replace(world.step(index, text + rows * columns), coordinates=places)
        fast.append(step)
        for oracle in naive:
            oracle.append(step)
        if min(oracle.margin for oracle in naive) < TIE:
            event("a near-tie ended the comparison")
            return
        compare(fast, naive)


def compare(fast: InfiniPotV, naive: list[NaiveInfiniPotV]) -> None:
    state = {
        name: tensor.flatten(0, 1) for name, tensor in fast.tensors().items() if tensor.ndim > 2
    }
    assert fast.report()["far_tokens_in_use"] == len(naive[0].chosen)
    for row, oracle in enumerate(naive):
        n = len(oracle.held)
        assert state["kept.step"][row].tolist() == [
            *(token.step for token in oracle.held),
            *[-1] * (oracle.config.budget - n),
        ]
        for name, expected in (
            ("keys", [token.key for token in oracle.held]),
            ("values", [token.value for token in oracle.held]),
            ("positions", [token.position for token in oracle.held]),
            ("coordinates", [torch.tensor(token.place) for token in oracle.held]),
        ):
            assert torch.equal(state[f"kept.{name}"][row, :n], torch.stack(expected))
