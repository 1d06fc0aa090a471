"""A memory of one's own: a name and a score, kept and saved like those of the package."""

import re
from pathlib import Path

import pytest
import torch

import protokv
from protokv.errors import ConfigError, StateMismatch
from protokv.memories import MEMORIES, MemoryConfig
from protokv.stream.session import Session
from tests.conftest import random_frames
from tests.memories import rules
from tests.memories.rules import LongestConfig
from tests.mock_backbone import MockBackbone


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))


@torch.inference_mode()
def test_the_newest_step_and_the_best_of_the_others_stay() -> None:
    backbone = MockBackbone()
    session = Session.start(backbone, MemoryConfig.of(f"{rules.__name__}:LongestConfig", budget=20))
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


def test_a_state_names_no_code_to_run_and_its_reader_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = MockBackbone()
    path = tmp_path / "state.safetensors"
    place = f"{rules.__name__}:LongestConfig"
    protokv.save(Session.start(backbone, MemoryConfig.of(place, budget=20)), path)
    monkeypatch.setattr(
        MEMORIES, "_entries", {name: MEMORIES._entries[name] for name in ("durable", "full")}
    )
    with pytest.raises(StateMismatch, match="longest-values, which is not known here"):
        protokv.load(path, backbone)
    with pytest.raises(ConfigError, match="there is no memory"):
        MemoryConfig.from_dict({"kind": place})
    monkeypatch.setenv("PROTOKV_MEMORY", place)
    assert protokv.load(path, backbone).config == LongestConfig(budget=20)


@pytest.mark.parametrize(
    "place", ["nowhere:Rule", f"{rules.__name__}:Nothing", f"{rules.__name__}:Longest", ":", "os:"]
)
def test_a_place_without_settings_of_a_memory_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"memory {place}: ")):
        MemoryConfig.of(place)
