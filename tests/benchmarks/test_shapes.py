"""The benchmarks of `shapes` and `flat` at tiny sizes: they run, and they withhold what is not proven."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protokv.config import DurableConfig, MemoryConfig
from protokv.memories import MEMORIES
from tests.benchmarks import flat
from tests.benchmarks.shapes.counts import counts_of
from tests.benchmarks.shapes.models import MODELS, Shape, build
from tests.benchmarks.shapes.oracles import ORACLES, ROOT
from tests.benchmarks.shapes.report import summary, summary_rows, write
from tests.benchmarks.shapes.run import Request, run
from tests.benchmarks.shapes.stages import measure, see
from tests.benchmarks.shapes.state_bytes import state_bytes
from tests.benchmarks.shapes.timing import Stopwatch, distribution, peak_within
from tests.benchmarks.shapes.work import work_of

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
VISION: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-7b": {"hidden_size": 32, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64, "depth": 2},
    "llava-ov-7b": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 42},
}
ROPE = {"qwen2.5-vl-7b": {"mrope_section": [4, 2, 2]}, "llava-ov-7b": {}}


def tiny(name: str) -> Shape:
    """A model in the form of the real one; four tokens a step."""
    real = MODELS[name]
    rope = {"rope_type": "default", "rope_theta": 1e4} | ROPE[name]
    vision = real.vision | VISION[name] | {real.vision_depth: 2}
    frames = real.frame[1]
    side = 56 if frames == 2 else 42
    return replace(
        real, text=real.text | TEXT | {"rope_parameters": rope}, vision=vision, frame=(side, frames), tokens=4
    )


def request(name: str, memories: list[str]) -> Request:
    return Request(
        shape=tiny(name),
        device=torch.device("cpu"),
        dtype=torch.float32,
        budgets=[24],
        memories=memories,
        rounds=2,
        layers=1,
        vocabulary=50,
        counts=False,
        peak=(8, 64),
        video=(60, 64, 48),
    )


@pytest.mark.parametrize(
    ("name", "memories"), [("qwen2.5-vl-7b", list(MEMORIES)), ("llava-ov-7b", ["durable", "full"])]
)
def test_a_run_measures_every_stage_of_every_memory(name: str, memories: list[str], tmp_path: Path) -> None:
    document = run(request(name, memories), dict.fromkeys(memories, True), tmp_path)
    stages: dict[str, set[str]] = {}
    for row in document["stages"]:
        stages.setdefault(row["memory"], set()).add(row["stage"])
        assert row["rounds"] >= 1
    parts = {"step behind the tower", "forward", "update", "context"}
    assert stages.pop("any") == {"decode", "preprocess", "vision tower"}
    assert set(stages) == set(memories)
    for found in stages.values():
        assert found == parts | {"first token", "per token", "commit"}
    # Of one layer of two.
    forward = next(row for row in document["stages"] if row["stage"] == "forward")
    assert forward["peak_mb"] >= 0
    assert forward["computed_ms"] == pytest.approx(2 * forward["median_ms"], abs=0.1)
    assert not document["withheld"]
    text = write(tmp_path, "shapes", document)
    assert "GPU figures: not measured" in text
    assert "COMPUTED" in text
    assert json.loads((tmp_path / "shapes.json").read_text())["stages"] == document["stages"]


def test_a_run_that_was_cut_short_goes_on_with_what_is_left(tmp_path: Path) -> None:
    asked, good = request("llava-ov-7b", ["sliding-window", "full"]), {"sliding-window": True, "full": True}
    kept: list[dict[str, Any]] = []

    def cut(document: dict[str, Any]) -> None:
        assert "UNFINISHED" in write(tmp_path, "shapes", document)
        kept.append(json.loads((tmp_path / "shapes.json").read_text()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, good, tmp_path, keep=cut)
    begun: list[str] = []
    document = run(asked, good, tmp_path, begun.append, earlier=kept[0])
    assert [what for what in begun if " at " in what] == ["full at 24"]
    window = [row for row in document["stages"] if row["memory"] == "sliding-window"]
    assert window == [row for row in kept[0]["stages"] if row["memory"] == "sliding-window"]
    assert [(row["memory"], row["budget"]) for row in summary_rows(document)] == [("sliding-window", 24), ("full", 24)]
    assert "UNFINISHED" not in write(tmp_path, "shapes", document)
    assert "sliding-window" in summary(document)
    # Of another request nothing is taken over.
    begun.clear()
    run(replace(asked, positions="compact", memories=["sliding-window"]), good, tmp_path, begun.append, earlier=kept[0])
    assert "sliding-window at 24" in begun


def test_what_does_not_equal_its_literal_form_has_no_figure(tmp_path: Path) -> None:
    asked = request("qwen2.5-vl-7b", ["sliding-window", "full"])
    document = run(asked, {"sliding-window": False, "full": True}, tmp_path)
    assert {row["memory"] for row in document["stages"]} == {"any", "full"}
    assert [row["memory"] for row in document["withheld"]] == ["sliding-window"]


def test_plans_and_merges_make_up_an_update_under_the_blocked_rule() -> None:
    shape = tiny("qwen2.5-vl-7b").cut(1, 50)
    backbone = build(shape, torch.float32, torch.device("cpu"))
    config = DurableConfig(budget=96, rule="blocked")
    times = measure(backbone, shape, config, see(backbone, shape, 4)[1], rounds=4).stopwatch.times
    parts = zip(times["update: plan"], times["update: merge"], times["update"], strict=True)
    assert all(plan + merge == pytest.approx(whole) for plan, merge, whole in parts)
    assert max(times["update: plan"]) > 0


def test_counts_are_of_a_step_and_of_a_decoded_token() -> None:
    few = counts_of(MemoryConfig.of("sliding-window", budget=6000), layers=1, budget=48)
    more = counts_of(MemoryConfig.of("sliding-window", budget=6000), layers=3, budget=48)
    assert few["watch_waits"] == few["token_waits"] == 0
    assert 0 < few["token_operations"] < more["token_operations"]
    assert 0 < few["watch_operations"] < more["watch_operations"]


def test_a_whole_model_is_measured_whole() -> None:
    asked = replace(request("qwen2.5-vl-7b", ["full"]), shape=MODELS["qwen2.5-vl-7b"], layers=None, vocabulary=None)
    assert asked.cut == MODELS["qwen2.5-vl-7b"]
    assert (replace(asked, layers=1).cut.layers, replace(asked, layers=1).cut.vision_layers) == (1, 1)


def test_every_memory_names_tests_that_exist() -> None:
    assert set(ORACLES) == set(MEMORIES)
    for node in {node for nodes in ORACLES.values() for node in nodes}:
        path, _, test = node.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert test in [part.name for part in tree.body if isinstance(part, ast.FunctionDef)]


def test_the_arithmetic_agrees_with_what_is_known_of_a_7b_model() -> None:
    shape, window = MODELS["qwen2.5-vl-7b"], MemoryConfig.of("sliding-window", budget=24_000)
    work = work_of(shape, window, 24_014, torch.bfloat16)
    # 6.53 billion weights outside of embedding and head, two operations each for a token; and attention.
    assert work["forward"].flop == pytest.approx(2 * 6.53e9 * 196 + 28 * 4 * 196 * 3584 * 24_112, rel=0.01)
    assert work["per token"].bytes == pytest.approx(2 * (6.53e9 + 152064 * 3584 + 28 * 4 * 24_014 * 256), rel=0.01)
    blocked = work_of(shape, MemoryConfig.of("durable", budget=24_000), 24_014, torch.bfloat16)
    assert blocked["update"].flop == blocked["update: plan"].flop + blocked["update: merge"].flop
    assert "update" not in work_of(shape, MemoryConfig.of("durable", budget=400), 414, torch.bfloat16)


def test_a_plan_costs_each_head_as_often_as_its_turn_comes() -> None:
    shape = MODELS["qwen2.5-vl-7b"]
    plans = [
        work_of(shape, MemoryConfig.of("durable", budget=budget), budget + 14, torch.bfloat16)["update: plan"].flop
        for budget in (6000, 24_000)
    ]
    # Four times the bank, and a fourth of the heads plan in a step.
    assert plans[1] == pytest.approx(plans[0], rel=0.02)


def test_bytes_of_a_state_are_those_of_its_tensors() -> None:
    shape = MODELS["qwen2.5-vl-7b"]
    rows = {row["memory"]: row for row in state_bytes(shape, [6000])}
    token = 2 * shape.layers * 4 * 128 * 2
    assert rows["sliding-window"]["mb"] == pytest.approx((6000 + 14) * token / 1e6, rel=0.01)
    assert rows["full"]["kb_a_token_more"] == pytest.approx(token / 1e3, rel=0.01)
    assert rows["durable"]["kb_a_token_more"] == 0


def test_a_percentile_is_one_of_the_times() -> None:
    found = distribution([float(n) for n in range(100, 0, -1)])
    assert found == {"median_ms": 50.5, "p95_ms": 95.0, "worst_ms": 100.0, "rounds": 100}
    assert distribution([3.0])["p95_ms"] == 3.0


def test_calls_of_a_round_are_one_number_and_warmup_is_none() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    for turn in range(3):
        assert stopwatch.time("a", lambda: 7) == 7
        stopwatch.time("a", lambda: 7)
        stopwatch.none_in_this_round("b")
        stopwatch.end_round(count=turn > 0)
    assert len(stopwatch.times["a"]) == 2
    assert stopwatch.times["b"] == [0.0, 0.0]


@pytest.mark.parametrize("rule", ["exact", "blocked"])
def test_a_stream_that_goes_on_keeps_its_bytes(rule: str) -> None:
    row = flat.measure(rule, early=30, late=60, rounds=2, tokens=4, prototypes=24)
    assert row["bytes_ratio"] == 1
    assert row["early_ms"] > 0


def test_a_peak_is_the_most_above_the_beginning_of_the_stage() -> None:
    changes = [(1, 100), (3, 20), (4, 50), (5, -60), (6, 30), (9, 500)]
    assert peak_within(changes, 2, 7) == 70
    assert peak_within(changes, 5, 7) == 0
    assert peak_within([], 0, 9) == 0


def test_on_a_cpu_the_peaks_are_those_of_a_round_of_its_own() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))

    def stage() -> None:
        torch.empty(1000, dtype=torch.uint8)
        kept.append(torch.empty(5000, dtype=torch.uint8))

    kept: list[torch.Tensor] = []
    stopwatch.peaks_of(lambda: stopwatch.time("outer", lambda: (stage(), stopwatch.time("inner", stage))))
    assert 10_000 <= stopwatch.peaks["outer"] < 20_000
    assert 5000 <= stopwatch.peaks["inner"] < stopwatch.peaks["outer"]
    assert not stopwatch.times
