"""From the shipped weights to a checkpoint that is asked about order, resumed at a border as if it had not stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini import weights_folder
from protokv.mini.phrases import TIME_TYPES
from samples.training import order_trainer
from samples.training.evaluate_order import answer_all, find_known_types
from samples.training.order_curriculum import make_curriculum
from samples.training.order_trainer import OrderTrainer
from samples.training.order_worlds import ASKED, ask_order, make_order_world
from samples.training.stages import save_atomically
from samples.training.time_curriculum import make_time_curriculum
from samples.training.train_order import train_order


@pytest.fixture
def curriculum(monkeypatch):
    monkeypatch.setattr(OrderTrainer, "held_out_batches", 1)
    monkeypatch.setattr(order_trainer, "WHOLE", replace(order_trainer.WHOLE, tokens=300))
    return [replace(stage, steps=2, tokens=300, whole=0.5) for stage in make_curriculum() if stage.name != "order"]


@pytest.fixture
def time_curriculum():
    return [replace(stage, steps=2, tokens=300, whole=0.5) for stage in make_time_curriculum()]


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


def test_the_clock_learns_alone_and_leaves_the_rest_as_it_was(bank, curriculum):
    state = Qwen2_5_VLForConditionalGeneration.from_pretrained(weights_folder(), dtype=torch.float32).state_dict()
    records = []
    trainer = OrderTrainer(state, bank, 1, records.append)
    before = {name: master.detach().clone() for name, master in trainer.optimizer.masters.items()}
    trainer.run_stage(replace(curriculum[0], steps=60, tokens=600, warm_up=10), 0)
    changed = {name for name, master in trainer.optimizer.masters.items() if not torch.equal(master, before[name])}
    assert changed
    assert all(name.startswith(("model.language_model.layers.0.", "links.clock.")) for name in changed)
    losses = [record["losses"]["clock"] for record in records if "losses" in record]
    assert losses[-1] < 0.7 * losses[0]
