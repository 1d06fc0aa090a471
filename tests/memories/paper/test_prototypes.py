"""How the parts of ProtoKV's state are shown."""

from protokv.memories.paper.memory import PaperPrototypeMemory
from tests.core.streams import World, feed, shape_of, small_config


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
