"""Memories under test: their names, and variants by settings."""

from __future__ import annotations

import pytest

from protokv.config import DurableConfig
from protokv.errors import ConfigError
from protokv.replay.memories import Variation, name_memories, vary_memories


def test_memories_are_named_by_their_one_name_and_the_full_cache_stands_once() -> None:
    assert name_memories(["durable"], [64])[0].config == DurableConfig(budget=64)
    assert [(v.label, v.config.budget) for v in name_memories(["paper", "full"], [64, 128])] == [
        ("paper", 64), ("full", 64), ("paper", 128),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="elephant"):
        name_memories(["elephant"], [64])


def test_a_variation_makes_one_variant_per_value_of_the_memories_that_it_names() -> None:
    memories = name_memories(["durable", "paper"], [64])
    decay = Variation("paper", "decay", [("floor", "floor"), ("off", "off")])
    found = vary_memories(memories, [decay, Variation(None, "seed", [("3", 3)])])
    assert [variant.label for variant in found] == [
        "durable seed=3", "paper decay=floor seed=3", "paper decay=off seed=3",
    ]  # fmt: skip
    assert [variant.config.seed for variant in found] == [3, 3, 3]
    assert found[2].config.to_dict()["decay"] == "off"


@pytest.mark.parametrize(
    ("variation", "said"),
    [
        (Variation("full", "seed", [("1", 1)]), "full is not compared"),
        (Variation(None, "colour", [("1", 1)]), "colour: there is no such setting of durable"),
        (Variation(None, "seed", [("x", "x")]), "seed: expected int"),
    ],
)
def test_a_variation_that_fits_no_memory_is_refused(variation: Variation, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        vary_memories(name_memories(["durable"], [64]), [variation])
