"""A memory of one's own: a name and a score, kept and saved like those of the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import protokv
from protokv.core.session import Session
from protokv.memories import CONFIGS, CompressedConfig, MemoryConfig, ScoredMemory
from tests.conftest import random_frames
from tests.mock_backbone import MockBackbone


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestConfig(CompressedConfig):
    """Keeps the tokens whose values are longest."""

    name: ClassVar[str] = "longest-values"


class Longest(ScoredMemory):
    """At most `budget` tokens."""

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        return values.norm(dim=-1)


LongestConfig.memory = Longest


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIGS, "_entries", dict(CONFIGS._entries))
    CONFIGS.add("longest-values", f"{__name__}:LongestConfig")


@torch.inference_mode()
def test_the_newest_step_and_the_best_of_the_others_stay(tmp_path: Path) -> None:
    backbone = MockBackbone()
    session = Session.start(backbone, MemoryConfig.of("longest-values", budget=20))
    norms: list[float] = []
    for seed in range(12):
        images = random_frames(seed, backbone.frames_per_step)
        session.watch(images)
        norms += backbone.embed_step(images).embeddings.norm(dim=-1).tolist()
    held = session.memory.tensors()
    assert 0 < (held["kept.step"] >= 0).sum(-1).max() <= 20
    old = held["kept.step"][0, 0]
    kept = held["kept.values"][0, 0][(old >= 0) & (old < 6)].float().norm(dim=-1)
    # Of the first steps the longest are left.
    assert len(kept)
    assert kept.min() >= sorted(norms[: 6 * 6], reverse=True)[len(kept) - 1] - 1e-4
    protokv.save(session, tmp_path / "state.safetensors")
    again = protokv.load(tmp_path / "state.safetensors", backbone)
    assert all(torch.equal(tensor, held[name]) for name, tensor in again.memory.tensors().items())
