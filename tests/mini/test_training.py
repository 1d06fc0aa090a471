"""Training in miniature: the tower, the bank, composed videos, a stage that learns, resuming, export."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from protokv.mini.phrases import TYPES
from protokv.mini.training.bank import Bank, build_bank
from protokv.mini.training.batches import IGNORED, make_batch, right
from protokv.mini.training.clips import DENSE, EMPTY, OVERLAPPING, SIMULTANEOUS, SINGLE, dense_step
from protokv.mini.training.compose import Composer
from protokv.mini.training.curriculum import CURRICULUM, Stage
from protokv.mini.training.evaluate import evaluate, held_out_world, table
from protokv.mini.training.export import export
from protokv.mini.training.loop import Trainer, rate_at, stage_file
from protokv.mini.training.model import new_model
from protokv.mini.training.stages import Journal, save_whole
from protokv.mini.training.vision_training import train_vision

COUNTS = {SINGLE: 400, OVERLAPPING: 21, SIMULTANEOUS: 13, EMPTY: 101, DENSE: 50}
SMALL = {"layers": 1}


@pytest.fixture(scope="module")
def visual():
    return new_model(3, **SMALL).model.visual.state_dict()


@pytest.fixture(scope="module")
def bank(visual):
    return build_bank(visual, seed=1, counts=COUNTS, processes=1, **SMALL)


def _tiny(**changes) -> Stage:
    stage = Stage(
        name="tiny",
        steps=30,
        rate=2e-3,
        spans=((1, 1),),
        events=(1, 2),
        weights={"whether": 1.0, "colour": 1.0},
        tokens=1200,
        warm_up=5,
    )
    return replace(stage, **changes)


def test_dense_labels_say_which_cells_hold_what():
    rng = np.random.default_rng(0)
    filled = 0
    for _ in range(20):
        frames, labels = dense_step(rng)
        assert frames.shape == (2, 84, 84, 3)
        assert ((labels[:, 0] == 0) == (labels[:, 1] == 0)).all()
        filled += int((labels[:, 0] > 0).sum())
    assert 20 < filled < 150


def test_the_vision_loss_falls():
    records = []
    visual = new_model(0, **SMALL).model.visual
    before = visual.blocks[0].attn.qkv.weight.clone()
    train_vision(visual, 0, 30, records.append, batch=8, workers=0)
    assert records[-1]["loss"] < 6.2
    assert visual.blocks[0].attn.qkv.weight.dtype == torch.float32
    assert not torch.equal(before, visual.blocks[0].attn.qkv.weight)


def test_the_bank_is_consistent_and_comes_back_from_its_tensors(bank):
    assert len(bank.length) == sum(COUNTS.values())
    assert len(bank.features) == len(bank.lit) == bank.length.sum()
    for clip in range(0, len(bank.length), 7):
        events = bank.events[bank.event_of[clip] : bank.event_of[clip + 1]]
        lit = bank.lit[bank.first[clip] : bank.first[clip] + bank.length[clip]]
        assert lit.any() == (bank.kind[clip] != EMPTY)
        for _, _, place, begin, end in events:
            assert lit[begin:end, place].all()
    again = Bank.from_tensors(bank.tensors())
    assert torch.equal(again.features, bank.features)
    np.testing.assert_array_equal(again.events, bank.events)


def test_composed_videos_keep_every_event_and_leave_out_empty_steps_only(bank):
    composer, rng = Composer(bank), np.random.default_rng(4)
    stage = _tiny(events=(1, 6), many=0.5, repeat=0.3)
    for _ in range(150):
        span, kept = [(4, 4), (9, 9), (64, 24), (640, 31)][int(rng.integers(4))]
        video = composer.compose(rng, stage, span, kept)
        assert len(video.rows) == len(video.times) == kept
        assert (np.diff(video.times) > 0).all()
        assert video.times[0] >= 0
        assert video.times[-1] < span
        assert video.events
        held = set(video.times.tolist())
        for event in video.events:
            assert set(range(int(event.start_s), int(event.end_s))) <= held
            for step in range(int(event.start_s), int(event.end_s)):
                assert video.lit[np.flatnonzero(video.times == step)[0], event.place]


def test_videos_of_many_events_ask_about_things_that_nothing_else_shares(bank):
    composer, rng = Composer(bank), np.random.default_rng(5)
    sizes = []
    for _ in range(40):
        video = composer.compose(rng, _tiny(many=1.0), 640, 60)
        shapes = [e.shape for e in video.events]
        sizes.append(len(shapes))
        assert len(set(shapes)) < 8
        assert any(shapes.count(s) == 1 for s in shapes)
    assert max(sizes) > 15


@pytest.mark.parametrize("stage", CURRICULUM, ids=lambda s: s.name)
def test_every_stage_of_the_curriculum_makes_batches(bank, stage):
    rng = np.random.default_rng(6)
    composer = Composer(bank)
    kinds = set()
    for i in range(6):
        batch = make_batch(rng, composer, replace(stage, tokens=400), i / 6)
        kinds |= set(batch.types)
        assert ((batch.labels != IGNORED).sum(-1) >= 2).all()
        assert (batch.times[:, -1] < batch.end).all()
        if batch.seen is not None:
            assert batch.seen.any(-1).all()
            assert not batch.seen.all()
    assert kinds <= set(stage.weights) | {"whether"}


def test_the_curriculum_asks_everything_in_the_end_over_spans_of_ten_minutes():
    last = CURRICULUM[-1]
    assert set(last.weights) == set(TYPES)
    assert max(span for span, _ in last.spans) >= 640
    assert rate_at(last, last.steps - 1) < 0.02 * last.rate
    assert rate_at(last, 0) < rate_at(last, last.warm_up)


def test_a_stage_learns_and_a_resumed_run_goes_on_as_if_it_had_not_stopped(visual, bank, tmp_path):
    stages = (_tiny(name="one"), _tiny(name="two", steps=7))
    losses = []
    whole = Trainer(visual, bank, 2, losses.append, **SMALL)
    (tmp_path / "whole").mkdir()
    whole.run(tmp_path / "whole", stages)
    first = [r for r in losses if "loss" in r]
    assert first[0]["loss"] < 4.0

    (tmp_path / "parts").mkdir()
    Trainer(visual, bank, 2, losses.append, **SMALL).run(tmp_path / "parts", stages[:1])
    resumed = Trainer(visual, bank, 2, losses.append, **SMALL)
    resumed.run(tmp_path / "parts", stages)
    assert {"resumed_after": "one"} in losses
    for name, master in whole.optimizer.masters.items():
        assert torch.equal(master, resumed.optimizer.masters[name]), name
    assert stage_file(tmp_path / "parts", stages[1]).exists()


def test_a_gate_ends_a_stage_early(visual, bank):
    records = []
    trainer = Trainer(visual, bank, 2, records.append, **SMALL)
    trainer.run_stage(_tiny(steps=150, gate={"whether": 0.0}, tokens=300), 0)
    assert records[-1] == {"stage": "tiny", "end": True, "steps": 100}


def test_last_can_start_as_the_opposite_of_first(visual, bank):
    trainer = Trainer(visual, bank, 2, lambda record: None, **SMALL)
    trainer._oppose_last()
    from protokv.mini.vocabulary import token_ids

    embedding = trainer.model.model.language_model.embed_tokens.weight
    assert torch.equal(embedding[token_ids()["last"]], -embedding[token_ids()["first"]])


def test_an_exported_folder_is_a_qwen2_5_vl_that_transformers_loads(visual, bank, tmp_path):
    trainer = Trainer(visual, bank, 2, lambda record: None, **SMALL)
    trainer.run_stage(_tiny(steps=2), 0)
    export(trainer.float_model(), tmp_path / "weights")
    names = {f.name for f in (tmp_path / "weights").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert {"generation_config.json", "preprocessor_config.json", "model.safetensors"} <= names
    assert not [f for f in tmp_path.iterdir() if f.name != "weights"]
    settings = json.loads((tmp_path / "weights" / "preprocessor_config.json").read_text())
    assert settings["min_pixels"] == settings["max_pixels"] == 84 * 84
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    assert model.config.protokv_fps == 2.0
    assert model.lm_head.weight.data_ptr() == model.model.language_model.embed_tokens.weight.data_ptr()
    for name, parameter in model.named_parameters():
        trained = trainer.optimizer.masters.get(name)
        if trained is not None:
            torch.testing.assert_close(parameter, trained.bfloat16().float(), atol=0, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "weights")("star?")["input_ids"]


def test_evaluation_scores_an_untrained_model_near_chance_and_prints_a_table():
    model = new_model(1, **SMALL).eval()
    cells = list(evaluate(model, lengths=[9], loads=["few"], ways=["full", "recent"], n=12))
    assert {cell.way for cell in cells} == {"full", "recent"}
    assert all(cells[0].asked[t] >= 10 for t in TYPES)
    assert np.mean(list(cells[0].accuracy.values())) < 0.4
    lines = list(table(cells))
    assert len(lines) == 2 + 1 + 2
    assert len({line.count("|") for line in lines}) == 1


def test_held_out_worlds_have_the_load_they_are_named_after():
    assert all(1 <= len(held_out_world("few", 37, i).events_until(37)) <= 4 for i in range(20))
    assert all(len(held_out_world("many", 90, i).events_until(90)) >= 5 for i in range(20))


def test_an_answer_is_right_when_its_words_are_whatever_its_end_is():
    labels = torch.tensor([[[IGNORED, 40, 41, 2]], [[IGNORED, 40, 2, IGNORED]]])
    logits = torch.zeros(5, 128)
    logits[[0, 1, 3], [40, 41, 39]] = 1.0
    assert right(logits, labels) == [True, False]


def test_the_journal_adds_lines_and_files_appear_whole(tmp_path):
    say = Journal(tmp_path)
    say({"a": 1})
    say({"b": 2})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [("a" in r, "b" in r, "wall_s" in r) for r in lines] == [(True, False, True), (False, True, True)]
    save_whole({"x": torch.arange(3)}, tmp_path / "x.safetensors")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["log.jsonl", "x.safetensors"]
