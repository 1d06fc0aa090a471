"""A stage learns, ends at its gate, and resumes as if it had not stopped."""

from __future__ import annotations

import torch

from samples.training.loop import stage_file
from samples.training.trainer import Trainer
from tests.training.tiny import SMALL, tiny


def test_a_stage_learns_and_a_resumed_run_goes_on_as_if_it_had_not_stopped(visual, bank, tmp_path):
    stages = (tiny(name="one"), tiny(name="two", steps=7))
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


def test_what_a_stage_file_does_not_know_stays_as_it_is(visual, bank):
    trainer = Trainer(visual, bank, 2, lambda record: None, **SMALL)
    new, *others = trainer.optimizer.masters
    trainer.optimizer.load({f"master.{name}": torch.ones_like(trainer.optimizer.masters[name]) for name in others})
    assert not trainer.optimizer.masters[new].eq(1).all()
    assert all(trainer.optimizer.masters[name].eq(1).all() for name in others)


def test_a_gate_ends_a_stage_early(visual, bank):
    records = []
    trainer = Trainer(visual, bank, 2, records.append, **SMALL)
    trainer.run_stage(tiny(steps=150, gate={"whether": 0.0}, tokens=300), 0)
    assert records[-1] == {"stage": "tiny", "end": True, "steps": 100}


def test_last_can_start_as_the_opposite_of_first(visual, bank):
    trainer = Trainer(visual, bank, 2, lambda record: None, **SMALL)
    trainer.begin(tiny(oppose_last=True))
    from protokv.mini.vocabulary import token_ids

    embedding = trainer.model.model.language_model.embed_tokens.weight
    assert torch.equal(embedding[token_ids()["last"]], -embedding[token_ids()["first"]])
