"""The code that trained the embedded models imports, and a step of it changes weights; its tests
stand beside it.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import torch

import samples.training
from samples.training.tests.conftest import bank, visual  # noqa: F401
from samples.training.tests.helpers import SMALL, tiny
from samples.training.trainer import Trainer


def test_every_module_of_training_imports() -> None:
    found = [one.name for one in pkgutil.iter_modules(samples.training.__path__) if not one.ispkg]
    assert len(found) > 30
    for name in found:
        import_module(f"samples.training.{name}")


def test_a_step_of_training_changes_the_weights(visual: Any, bank: Any) -> None:  # noqa: F811
    records: list[dict[str, Any]] = []
    trainer = Trainer(visual, bank, 1, records.append, **SMALL)
    before = {name: master.clone() for name, master in trainer.optimizer.masters.items()}
    trainer.run_stage(tiny(steps=1), 0)
    assert any(
        not torch.equal(before[name], master) for name, master in trainer.optimizer.masters.items()
    )
    assert records
