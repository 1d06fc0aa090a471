"""Studies: the files that ship and those of the samples, their memories and streams."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from protokv.errors import ConfigError
from protokv.memories import DurableConfig, PaperConfig
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.memories import SettingSweep, make_memory_variants, vary_memory_settings
from protokv.replay.questions import plan_asks
from protokv.replay.rows import AnswerRow
from samples.worlds.studies import FOLDER, list_studies, load_study

STUDIES = list_studies()
OF_WORLDS = [name for name in STUDIES if load_study(name).worlds]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_different_memories_that_fit(name: str) -> None:
    study = load_study(name)
    for budgets in (study.budgets, [512], *(part.budgets for part in study.datasets)):
        found = study.variants(budgets)
        assert len({(v.label, v.config.budget) for v in found}) == len(found) > 1
        # At most a row and its default are the same memory.
        assert len({str(v.config) for v in found}) >= len(found) - 2
        assert sum(v.label == "full" for v in found) <= 1
    assert {part.name for part in study.datasets} <= BENCHMARKS.keys()


@pytest.mark.parametrize("name", OF_WORLDS)
def test_every_study_fits_its_own_streams(name: str) -> None:
    study = load_study(name)
    assert study.worlds
    streams = msgspec.structs.replace(study.worlds, count=4).open(study.types)
    placed = {
        tuple(
            str(stream.facts["world"].get(name))
            for name in ("before_s", "again_s", "counted_in", "crossing_s")
        )
        for stream in streams
    }
    assert len(placed) == (4 if study.worlds.before == "mix" else 1)
    for stream in streams:
        # The longest delay fits wherever the evidence lies.
        asks = plan_asks(
            stream.questions, study.delays_s, stream.length_s, Counter(), types=study.types
        )
        wanted = [
            question
            for question in stream.questions
            if study.types is None or question.type in study.types
        ]
        assert len({ask.question.id for ask in asks}) == len(wanted) > 4


@pytest.mark.parametrize("name", ["harder", "decay", "hour", "order", "time", "long-budget"])
def test_published_rows_are_of_the_memories_and_worlds_of_their_study(name: str) -> None:
    study = load_study(name)
    lines = gzip.decompress((FOLDER / "harder" / f"{name}.jsonl.gz").read_bytes()).splitlines()
    rows = [msgspec.json.decode(line, type=AnswerRow) for line in lines]
    variants = study.variants(study.budgets)
    assert {(row.memory, row.budget) for row in rows} == {(v.label, v.budget) for v in variants}
    assert study.worlds
    assert {row.video for row in rows} == {f"world-{seed}" for seed in study.worlds.seeds}
    # Worlds of four places; opening all of them would take seconds.
    some = msgspec.structs.replace(study.worlds, count=4).open(study.types)
    streams = {stream.name: stream for stream in some}
    rows = [row for row in rows if row.video in streams]
    for row in {row.video: row for row in rows}.values():
        assert row.stream["world"] == streams[row.video].facts["world"]
    asked = {(row.video, row.question_id, row.question, row.expected) for row in rows}
    assert asked <= {
        (name, q.id, q.text, q.answer) for name, stream in streams.items() for q in stream.questions
    }


def test_the_ablation_asks_when_the_codebooks_are_fitted() -> None:
    study = load_study("ablation")
    assert study.worlds
    first_s = min(
        question.reference_s for stream in study.worlds.open() for question in stream.questions
    )
    for budget in (*study.budgets, 151):
        paper = study.variants([budget])[0].config
        assert isinstance(paper, PaperConfig)
        # Steps of nine tokens fill the near window and open every prototype; from then on each
        # token is a residual.
        assert (paper.near_tokens + paper.prototypes + paper.warmup_residuals) / 9 + 1 < first_s


def test_the_coefficient_sweep_halves_and_doubles_each_constant() -> None:
    paper, *found = load_study("coefficients").variants([512])
    assert len(found) == 10
    for variant in found:
        factor = float(variant.label.rpartition("x")[2])
        for name, value in variant.config.changes().items():
            assert value == pytest.approx(factor * getattr(paper.config, name))


def test_a_row_with_budgets_of_its_own_is_run_at_these_and_at_budgets_named_by_hand() -> None:
    study = load_study("harder")
    assert {v.label for v in study.variants([4])} == {"full", "durable"}
    assert len(study.variants([100])) == 10


def test_only_an_embedded_model_has_the_small_budgets_of_a_study() -> None:
    assert load_study("quick").default_budgets("protokv/mini") == (72,)
    assert load_study("quick").default_budgets("Qwen/Qwen2.5-VL-7B-Instruct") == [6000]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title = 1", "title"),
        ("title = ", "not a study"),
        ('title = "x"\nmemories = ["full"]\ncolour = 1', "colour"),
        ('title = "x"\nmemories = ["full"]\n[worlds]\npressure = 1', "pressure"),
        ('title = "x"\nmemories = ["full"]', "no streams"),
    ],
)
def test_a_file_that_is_no_study_is_refused_by_what_is_wrong(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_study(str(tmp_path / "x.toml"))


@pytest.mark.parametrize("name", ["everything", "absent.toml"])
def test_a_study_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(name)):
        load_study(name)


@pytest.mark.parametrize("script", ["delay", "harder"])
def test_every_study_that_a_script_names_is_there(script: str) -> None:
    named = re.findall(
        r"^(?:replay|worlds) ([a-z]+) ", (FOLDER / script / "run.sh").read_text(), re.MULTILINE
    )
    assert named
    assert set(named) <= set(STUDIES)


def test_memories_are_named_by_their_one_name_and_the_full_cache_stands_once() -> None:
    assert make_memory_variants(["durable"], [64])[0].config == DurableConfig(budget=64)
    assert [
        (v.label, v.config.budget) for v in make_memory_variants(["paper", "full"], [64, 128])
    ] == [
        ("paper", 64),
        ("full", 64),
        ("paper", 128),
    ]
    with pytest.raises(ConfigError, match="elephant"):
        make_memory_variants(["elephant"], [64])


def test_a_variation_makes_one_variant_per_value_of_the_memories_that_it_names() -> None:
    memories = make_memory_variants(["durable", "paper"], [64])
    decay = SettingSweep("paper", "decay", [("floor", "floor"), ("off", "off")])
    found = vary_memory_settings(memories, [decay, SettingSweep(None, "seed", [("3", 3)])])
    assert [variant.label for variant in found] == [
        "durable seed=3",
        "paper decay=floor seed=3",
        "paper decay=off seed=3",
    ]
    assert [variant.config.seed for variant in found] == [3, 3, 3]
    assert found[2].config.to_dict()["decay"] == "off"


@pytest.mark.parametrize(
    ("variation", "said"),
    [
        (SettingSweep("full", "seed", [("1", 1)]), "full is not compared"),
        (SettingSweep(None, "colour", [("1", 1)]), "colour: there is no such setting of durable"),
        (SettingSweep(None, "seed", [("x", "x")]), "seed: expected a whole number"),
    ],
)
def test_a_variation_that_fits_no_memory_is_refused(variation: SettingSweep, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        vary_memory_settings(make_memory_variants(["durable"], [64]), [variation])
