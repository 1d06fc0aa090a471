"""How the parts of ProtoKV's state are shown."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.core import prototypes as pseudo_tokens
from protokv.memories.paper.memory import PaperPrototypeMemory
from protokv.texts import Keywords
from tests.core.streams import World, copy_of, feed, shape_of, small_config

LENGTHS = st.lists(st.integers(1, 9), min_size=6, max_size=16)


@given(
    lengths=LENGTHS,
    reads=st.lists(st.booleans(), min_size=16, max_size=16),
    few=st.sampled_from([1, 2**18]),
    seed=st.integers(0, 99),
    changes=st.fixed_dictionaries(
        {
            "idle_steps": st.sampled_from([1, 4]),
            "decay": st.sampled_from(["floor", "interval", "off"]),
        }
        | dict.fromkeys(("residual", "merge", "recycle"), st.booleans())
        | {"anchor": st.sampled_from(["recent", "average"])}
    ),
)
def test_what_attention_reads_follows_every_step_as_if_built_from_the_state_alone(
    lengths: list[int], reads: list[bool], few: int, seed: int, changes: Keywords
) -> None:
    shape = shape_of(heads=2, components=3)
    config = small_config(**changes)
    world = World(shape, seed)
    memory, alone = (PaperPrototypeMemory(config, shape, world.rotary) for _ in range(2))
    memory.start(*world.sink())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pseudo_tokens, "_TOKENS_AT_ONCE", few)
        for index, tokens in enumerate(lengths):
            memory.append(world.step(index, tokens))
            if reads[index]:
                memory.context()
    alone.load(copy_of(memory))
    one = memory.context()
    other = alone.context()
    for name in ("keys", "values", "bias"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_the_report_tells_what_the_bank_holds() -> None:
    shape = shape_of(layers=2, heads=2)
    world = World(shape, 4)
    memory = PaperPrototypeMemory(small_config(), shape, world.rotary)
    feed(memory, world, [5] * 3)
    early = memory.report()["layers"][0]
    assert early["codebooks"] == "warming up"
    assert 0 <= early["warmup_residuals"] < early["warmup_target"] == 11
    for index in range(3, 30):
        memory.append(world.step(index, 5))
    state = memory.tensors()
    report = memory.report()
    assert report["near_tokens_in_use"] == 5
    for index, layer in enumerate(report["layers"]):
        mass = state["bank.mass"][index]
        assert layer["slots"] == mass.numel()
        assert layer["slots_in_use"] == int((mass > 0).sum())
        assert layer["mass_quantiles"][-1] == float(mass.max())
        assert len(layer["age_quantiles_steps"]) == 5
        assert layer["merged"] == int(state["bank.merged"][index].sum())
        assert layer["codebooks"] == "fitted"
        assert 0 < layer["key_usage_entropy_bits"] <= 2.0
