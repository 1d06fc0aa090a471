"""What every registered memory promises; a new one is tested here by being registered."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protokv.core.build import build_memory
from protokv.core.memory import Memory
from protokv.core.tensors import MemoryShape, TensorDict
from protokv.errors import ConfigError
from protokv.memories import MEMORIES, MemoryConfig, PaperConfig
from protokv.testing import MemoryTests
from protokv.testing.memories import LENGTHS, build, find_visible, reads_within_budget, recall
from tests.core.streams import World, feed, shape_of, small_config, small_durable
from tests.oracles.invariants import check_bank

BUDGET = 29
CASES: dict[str, MemoryConfig] = {
    kind: MemoryConfig.of(kind, budget=BUDGET) for kind in MEMORIES
} | {
    "paper-small": small_config(BUDGET),
    "paper-near-only": small_config(BUDGET, split=(1, 0)),
    "paper-far-only": small_config(BUDGET, split=(0, 1)),
    "paper-no-residual": small_config(BUDGET, residual=False, anchor="average"),
    "durable-32": small_durable(BUDGET),
    "durable-far-only": small_durable(BUDGET, split=(0, 1)),
}
HALF_PRECISION = ("paper-small", "durable", "infinipot-v")


class TestMemories(MemoryTests):
    """Every memory of the house, in small settings."""

    configs = tuple(CASES.values())

    def check(self, memory: Memory) -> None:
        """Masses of a bank agree with its counters."""
        if "bank.mass" in memory.tensors():
            check_bank(memory.tensors())

    def damage(self, good: TensorDict) -> list[tuple[str, TensorDict]]:
        """Numbers that serve as an index are out of range."""
        bad = []
        if "near.ring" in good:
            start, count, last = good["near.ring"].tolist()
            for ring in (
                [10**6, count, last],
                [start, -1, last],
                [start, 10**6, last],
                [start, count, last + 1],
            ):
                bad.append(("near.ring", good | {"near.ring": torch.tensor(ring)}))
        if "kept.count" in good:
            far, near, last = good["kept.count"].tolist()
            for count in (
                [-1, near, last],
                [far, -1, last],
                [10**9, near, last],
                [far, near, last + 1],
            ):
                bad.append(("kept.count", good | {"kept.count": torch.tensor(count)}))
        if "archive.lengths" in good:
            cut = good["archive.lengths"]
            twice = torch.cat((cut[:1] + cut[1:2], cut[2:], cut[:1] * 0))
            for lengths in (cut - 1, twice, torch.cat((cut[:2].sum()[None], cut[2:])), cut[:0]):
                bad.append(("archive.", good | {"archive.lengths": lengths}))
        for name in ("near.step", "bank.last_step", "kept.step"):
            if name in good and good[name].numel():
                bad.append((name, good | {name: good[name] + len(LENGTHS)}))
        for name, tensor in good.items():
            if tensor.is_floating_point() and tensor.numel():
                for number in (
                    float("nan"),
                    *([] if name == "rule.cost" else [float("inf"), -1e30]),
                ):
                    one = tensor.clone()
                    one.view(-1)[-1] = number
                    bad.append((name, good | {name: one}))
        return bad


class TestHalfPrecision(TestMemories):
    """Some of them with keys and values in bfloat16."""

    configs = tuple(CASES[name] for name in HALF_PRECISION)

    @pytest.fixture
    def shape(self) -> MemoryShape:
        return shape_of(heads=3, size=16, components=3, sink=5, dtype=torch.bfloat16)


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(MEMORIES)),
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(9, 40),
    st.integers(0, 99),
)
def test_any_lengths_of_steps_keep_to_any_budget(
    name: str, lengths: list[int], budget: int, seed: int
) -> None:
    shape = shape_of(components=1, size=8)
    small = {config.name: config for config in (small_config(budget), small_durable(budget))}
    config = small.get(name) or MemoryConfig.of(name, budget=budget)
    memory, world = build(config, shape, seed)
    feed(memory, world, lengths)
    for seen in find_visible(memory):
        assert not reads_within_budget(memory) or int(seen.sum()) <= budget + shape.sink_tokens
        exact = seen & (recall(memory).bias[0, 0] == 0)
        assert int(exact.sum()) >= min(shape.sink_tokens + 1, int(seen.sum()))


def test_a_head_size_that_the_subquantizers_do_not_divide_is_refused_with_both_numbers() -> None:
    shape = shape_of(size=12)
    with pytest.raises(ConfigError, match=r"8.*12"):
        build_memory(PaperConfig(budget=512), shape, World(shape, 0).rotary)
    build_memory(
        PaperConfig(budget=512).with_fields({"residual": False}), shape, World(shape, 0).rotary
    )
