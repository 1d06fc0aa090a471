"""The benchmarks at tiny sizes: they run, their parts are equal, and a memory that is not proven has no figures."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protokv.backbones import load_backbone
from protokv.memories import CONFIGS, DurableConfig, MemoryConfig
from tests.backbones.tiny import write_smolvlm
from tests.benchmarks import flat, soak
from tests.benchmarks.attention import compare
from tests.benchmarks.decode import WAYS
from tests.benchmarks.decode import measure as measure_decoding
from tests.benchmarks.shapes.models import MODELS, Shape, build
from tests.benchmarks.shapes.oracles import ORACLES, ROOT
from tests.benchmarks.shapes.run import Request, run, summary_rows, write
from tests.benchmarks.shapes.stages import measure, see
from tests.benchmarks.shapes.work import work_of
from tests.benchmarks.snapshot_cost import measured, tensors_of
from tests.realsize.cost import cost

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
    """Return a model in the form of the real one, with four tokens a step."""
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
        rounds=1,
        layers=1,
        vocabulary=50,
        peak=(8, 64),
        video=(60, 64, 48),
    )


def test_a_run_measures_every_stage_of_every_memory(tmp_path: Path) -> None:
    memories = list(CONFIGS)
    document = run(request("qwen2.5-vl-7b", memories), dict.fromkeys(memories, True), tmp_path)
    stages: dict[str, set[str]] = {}
    for row in document["stages"]:
        stages.setdefault(row["memory"], set()).add(row["stage"])
        assert row["rounds"] >= 1
    parts = {"step behind the tower", "forward", "update", "context"}
    assert stages.pop("any") == {"decode", "preprocess", "vision tower"}
    assert set(stages) == set(memories)
    for found in stages.values():
        assert found == parts | {"first token", "per token", "commit"}
    # One layer of two is measured.
    forward = next(row for row in document["stages"] if row["stage"] == "forward")
    assert forward["computed_ms"] == pytest.approx(2 * forward["median_ms"], abs=0.1)
    assert not document["withheld"]
    assert [row["memory"] for row in summary_rows(document)] == memories
    text = write(tmp_path, "shapes", document)
    assert "GPU figures: not measured" in text
    assert "COMPUTED" in text
    assert json.loads((tmp_path / "shapes.json").read_text())["stages"] == document["stages"]


def test_a_memory_that_does_not_equal_its_literal_form_has_no_figure(tmp_path: Path) -> None:
    asked = request("llava-ov-7b", ["sliding-window", "full"])
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


def test_the_parts_of_a_step_at_real_size_are_told_once_the_budget_is_full(tmp_path: Path) -> None:
    row = cost(load_backbone(str(write_smolvlm(tmp_path)), device="cpu"), "durable", budget=48, steps=1)
    assert set(row) >= {"decode", "preprocess", "vision", "context", "forward", "memory"}
    assert row["step_tokens"] == 25
    assert 0 < row["beside_percent"] < 100


def test_every_memory_names_tests_that_exist() -> None:
    assert set(ORACLES) == set(CONFIGS)
    for node in {node for nodes in ORACLES.values() for node in nodes}:
        path, _, test = node.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert test in [part.name for part in tree.body if isinstance(part, ast.FunctionDef)]


def test_the_arithmetic_agrees_with_a_7b_model() -> None:
    shape, window = MODELS["qwen2.5-vl-7b"], MemoryConfig.of("sliding-window", budget=24_000)
    work = work_of(shape, window, 24_014, torch.bfloat16)
    # 6.53 billion weights outside of embedding and head, two operations each for a token; and attention.
    assert work["forward"].flop == pytest.approx(2 * 6.53e9 * 196 + 28 * 4 * 196 * 3584 * 24_112, rel=0.01)
    assert work["per token"].bytes == pytest.approx(2 * (6.53e9 + 152064 * 3584 + 28 * 4 * 24_014 * 256), rel=0.01)
    blocked = work_of(shape, MemoryConfig.of("durable", budget=24_000), 24_014, torch.bfloat16)
    assert blocked["update"].flop == blocked["update: plan"].flop + blocked["update: merge"].flop
    assert "update" not in work_of(shape, MemoryConfig.of("durable", budget=400), 414, torch.bfloat16)


@pytest.mark.parametrize("rule", ["exact", "blocked"])
def test_a_stream_that_goes_on_keeps_its_bytes(rule: str) -> None:
    rows = list(flat.measure(rule, early=12, late=[24, 40], rounds=2, tokens=4, prototypes=24))
    assert [row["late_step"] for row in rows] == [24, 40]
    assert {row["bytes_ratio"] for row in rows} == {1}
    assert len({row["file_bytes"] for row in rows}) == 1


@pytest.mark.slow
def test_a_day_of_video_has_a_row_for_each_commit(tmp_path: Path) -> None:
    soak.write_video(tmp_path / "day.mp4", minutes=2)
    rows = list(soak.watch(tmp_path / "day.mp4", tmp_path / "day.safetensors", budget=64, every=40))
    assert [row["steps"] for row in rows] == [40, 80, 120]
    assert all(row["cpu_ms"] > 0 and row["resident_mib"] > 0 and row["decoder_mib"] > 0 for row in rows)


def test_attention_equals_its_oracle_and_every_size_has_a_row() -> None:
    assert len(compare(torch.device("cpu"), unit=12, tokens=9, head_size=16, rounds=1)) == 8


def test_every_way_of_decoding_reads_the_same(tmp_path: Path) -> None:
    assert len(measure_decoding(tmp_path, frames=60, width=128, height=96, gops=(15,), rounds=1)) == len(WAYS)


def test_every_form_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: None)
    assert len(measured(tensors_of(2, 1), tmp_path, 1)) == 9
