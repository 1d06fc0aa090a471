"""Stages learn, end at their gate, and resume to the same weights; the result is a published
checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from protokv.mini.backbone import MiniBackbone
from samples.training.evaluate_order import answer_all, find_known_types
from samples.training.export import export
from samples.training.model import make_model
from samples.training.order_curriculum import make_curriculum
from samples.training.order_trainer import OrderTrainer
from samples.training.order_worlds import ASKED, ask_order, make_order_world
from samples.training.stages import save_atomically
from samples.training.tests.helpers import SMALL, tiny
from samples.training.time_curriculum import make_time_curriculum
from samples.training.train_order import train_order
from samples.training.trainer import Trainer
from samples.training.vision_training import train_vision
from samples.worlds.phrases import TIME_TYPES


@pytest.mark.slow
def test_a_stage_learns_and_a_resumed_run_goes_on_as_if_it_had_not_stopped(visual, bank, tmp_path):
    stages = (tiny(name="one"), tiny(name="two", steps=7))
    records = []
    masters = []
    for folder, runs in (
        (tmp_path / "whole", [stages]),
        (tmp_path / "parts", [stages[:1], stages]),
    ):
        folder.mkdir()
        for wanted in runs:
            trainer = Trainer(visual, bank, 2, records.append, **SMALL)
            trainer.run(folder, wanted)
        masters.append(trainer.optimizer.masters)
    assert next(record["loss"] for record in records if "loss" in record) < 4.0
    assert {"resumed_after": "one"} in records
    assert all(torch.equal(masters[0][name], master) for name, master in masters[1].items())


def test_a_weight_that_a_stage_file_lacks_stays_unchanged(visual, bank):
    trainer = Trainer(visual, bank, 2, lambda record: None, **SMALL)
    new, *others = trainer.optimizer.masters
    trainer.optimizer.load(
        {f"master.{name}": torch.ones_like(trainer.optimizer.masters[name]) for name in others}
    )
    assert not trainer.optimizer.masters[new].eq(1).all()
    assert all(trainer.optimizer.masters[name].eq(1).all() for name in others)


def test_a_gate_ends_a_stage_early(visual, bank):
    records = []
    trainer = Trainer(visual, bank, 2, records.append, **SMALL)
    trainer.window = 2
    trainer.run_stage(tiny(steps=5, gate={"whether": 0.0}, tokens=300), 0)
    assert records[-1] == {"stage": "tiny", "end": True, "steps": 2}


def test_the_vision_tower_learns_in_bfloat16_and_ends_in_float32():
    visual = make_model(0, **SMALL).model.visual
    before = visual.blocks[0].attn.qkv.weight.clone()
    train_vision(visual, 0, 2, lambda record: None, batch=8, workers=0)
    assert visual.blocks[0].attn.qkv.weight.dtype == torch.float32
    assert not torch.equal(before, visual.blocks[0].attn.qkv.weight)


def test_an_exported_folder_is_a_qwen2_5_vl_that_transformers_loads(visual, bank, tmp_path):
    trainer = Trainer(visual, bank, 2, lambda record: None, **SMALL)
    trainer.run_stage(tiny(steps=2), 0)
    export(trainer.float_model(), tmp_path / "weights")
    names = {f.name for f in (tmp_path / "weights").iterdir()}
    assert names == {f.name for f in MiniBackbone.folder("protokv/mini").iterdir()}
    assert not [f for f in tmp_path.iterdir() if f.name != "weights"]
    assert "config_hash" in json.loads((tmp_path / "weights" / "identity.json").read_text())
    settings = json.loads((tmp_path / "weights" / "preprocessor_config.json").read_text())
    assert settings["min_pixels"] == settings["max_pixels"] == 84 * 84
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path / "weights", dtype=torch.float32
    )
    assert model.config.protokv_fps == 2.0
    assert (
        model.lm_head.weight.data_ptr() == model.model.language_model.embed_tokens.weight.data_ptr()
    )
    for name, parameter in model.named_parameters():
        trained = trainer.optimizer.masters.get(name)
        if trained is not None:
            torch.testing.assert_close(parameter, trained.bfloat16().float(), atol=0, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "weights")("star?")["input_ids"]


@pytest.fixture
def curriculum(monkeypatch):
    monkeypatch.setattr(OrderTrainer, "held_out_batches", 1)
    monkeypatch.setattr(OrderTrainer, "whole", replace(OrderTrainer.whole, tokens=300))
    return [
        replace(stage, steps=2, tokens=300, whole=0.5)
        for stage in make_curriculum()
        if stage.name != "order"
    ]


@pytest.fixture
def time_curriculum():
    return [replace(stage, steps=2, tokens=300, whole=0.5) for stage in make_time_curriculum()]


@pytest.mark.slow
def test_a_tiny_run_ends_in_a_checkpoint_that_is_asked_about_order_and_resumes_to_the_same_weights(
    bank, curriculum, time_curriculum, tmp_path
):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        save_atomically(bank.tensors(), tmp_path / name / "bank.safetensors")
    made = train_order(tmp_path / "whole", 1, curriculum, time_curriculum)
    for done in (time_curriculum[:0], time_curriculum[:1]):
        train_order(tmp_path / "parts", 1, curriculum[: 2 + len(done)], done)
    resumed = train_order(tmp_path / "parts", 1, curriculum, time_curriculum)
    one, two = (load_file(folder / "model.safetensors") for folder in (made, resumed))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert set(find_known_types(made)) == {*ASKED, *TIME_TYPES}
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(made, dtype=torch.float32).eval()
    assert len(model.model.language_model.layers) == 8
    assert model.config.text_config.rope_parameters["mrope_section"] == [12, 2, 2]
    world = make_order_world("middle", 0)
    asked = ask_order(world, ("middle_before", "tenth"), 2)
    assert len(answer_all(model, world, asked)) == len(asked) == 4
    log = (tmp_path / "parts" / "log.jsonl").read_text()
    assert '"resumed_after": "compare"' in log
    assert '"resumed_after": "onset"' in log
    assert log.count("held_out") == 5
    assert log.count('"crossing": {') == 3


def test_a_stage_of_the_clock_changes_the_clock_alone(bank, curriculum):
    state = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        MiniBackbone.folder("protokv/mini"), dtype=torch.float32
    ).state_dict()
    trainer = OrderTrainer(state, bank, 1, lambda record: None)
    before = {name: master.detach().clone() for name, master in trainer.optimizer.masters.items()}
    trainer.run_stage(curriculum[0], 0)
    changed = {
        name
        for name, master in trainer.optimizer.masters.items()
        if not torch.equal(master, before[name])
    }
    assert changed
    assert all(
        name.startswith(("model.language_model.layers.0.", "links.clock.")) for name in changed
    )
