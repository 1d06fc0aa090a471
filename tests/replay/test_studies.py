"""Named studies and variations: different memories that fit their streams."""

from __future__ import annotations

import pytest

from protokv.backbones import EMBEDDED
from protokv.config import DurableConfig, PaperConfig
from protokv.errors import ConfigError
from protokv.replay.request import Worlds
from protokv.replay.schedule import schedule
from protokv.replay.streams import make_worlds
from protokv.replay.studies import (
    STUDIES,
    Variation,
    default_budgets,
    find_study,
    name_memories,
    name_memory,
    vary_memories,
)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_different_memories_that_fit(name: str) -> None:
    found = find_study(name).variants([144, 512])
    assert len({(v.label, v.config.budget) for v in found}) == len(found) > 1
    assert len({(v.config.budget, str(v.config)) for v in found}) >= len(found) - 2
    assert sum(v.label == "full" for v in found) <= 1


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_fits_its_own_streams(name: str) -> None:
    study = find_study(name)
    assert study.variants()
    streams = Worlds(study.seeds[:4]).open(study, study.types)
    placed = {
        tuple(str(stream.facts["world"].get(name)) for name in ("before_s", "again_s", "counted_in", "crossing_s"))
        for stream in streams
    }
    assert len(placed) == (4 if study.before == "mix" else 1)
    for stream in streams:
        # Wherever its evidence lies, the longest delay fits.
        asked = schedule(stream.questions, study.delays_s, stream.length_s, types=study.types)
        wanted = [question for question in stream.questions if study.types is None or question.type in study.types]
        assert asked.questions == len(wanted) > 4


def test_the_ablation_asks_when_the_codebooks_are_fitted() -> None:
    study = find_study("ablation")
    for budget in (*study.budgets, 151):
        found = {variant.label: variant.config for variant in study.variants([budget])}
        paper = found["paper"]
        assert isinstance(paper, PaperConfig)
        # Steps of nine tokens fill the near window and open every prototype; from then on each token is a residual.
        steps = (paper.near_tokens + paper.prototypes + paper.warmup_residuals) / 9 + 1
        streams = make_worlds(study.seeds, study.length_s, study.pressure, before=study.before)
        assert steps < min(question.reference_s for stream in streams for question in stream.questions)
        assert found["decay once per idle interval"] == paper.with_fields({"decay": "interval"})


def test_the_coefficient_sweep_halves_and_doubles_each_constant() -> None:
    found = {variant.label: variant.config for variant in find_study("coefficients").variants([512])}
    assert len(found) == 11
    assert found["T_idle x2"].with_fields({"idle_steps": 120}) == found["paper"]
    assert found["alpha, beta x0.5"].to_dict()["key_rate"] == 0.025


def test_memories_are_named_by_their_one_name() -> None:
    assert name_memory("durable", 64).config == DurableConfig(budget=64)
    assert name_memory("full", 64).config.name == "full"
    assert [(v.label, v.config.budget) for v in name_memories(["paper", "full"], [64, 128])] == [
        ("paper", 64), ("full", 64), ("paper", 128),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="elephant"):
        name_memory("elephant", 64)


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


def test_only_the_embedded_model_has_the_small_budgets_of_a_study() -> None:
    study = find_study("quick")
    assert default_budgets(study, EMBEDDED) == [72]
    assert default_budgets(study, "Qwen/Qwen2.5-VL-7B-Instruct") == [6000]
