"""The same code on a CUDA device: within tolerance of the CPU, and back from a state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protokv.backbones import load_backbone
from protokv.backbones.base import Backbone
from protokv.checkpoint import to_state
from protokv.config import DurableConfig, MemoryConfig, PaperConfig
from protokv.session import Session
from tests.conftest import random_frames

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
QUESTION = "what is the first star ?"


@pytest.fixture(scope="module")
def cuda(tiny_folder: Path) -> Backbone:
    return load_backbone(str(tiny_folder), device="cuda", dtype="float32")


def test_logits_on_cuda_equal_those_on_the_cpu_before_the_first_eviction(tiny: Backbone, cuda: Backbone) -> None:
    sessions = [Session.start(backbone, PaperConfig(budget=400)) for backbone in (tiny, cuda)]
    for step in range(5):
        for session in sessions:
            session.watch(random_frames(step))
    cpu_logits, cuda_logits = (session.prefill(QUESTION) for session in sessions)
    # Another order of sums, on tensor cores where these are allowed.
    torch.testing.assert_close(cuda_logits.cpu(), cpu_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("preset", ["paper", "durable"])
def test_a_bounded_stream_runs_and_is_repeatable_on_cuda(cuda: Backbone, preset: str) -> None:
    def logits() -> torch.Tensor:
        session = Session.start(cuda, MemoryConfig.of(preset, budget=48))
        for step in range(30):
            session.watch(random_frames(step))
        return session.prefill(QUESTION)

    first = logits()
    assert first.isfinite().all()
    torch.testing.assert_close(logits(), first, rtol=1e-3, atol=1e-3)


def test_a_state_of_the_gpu_continues_on_the_cpu(tiny: Backbone, cuda: Backbone) -> None:
    config = DurableConfig(budget=48)
    there = Session.start(cuda, config)
    for step in range(20):
        there.watch(random_frames(step))
    tensors = {name: tensor.cpu() for name, tensor in there.tensors().items()}
    here = Session.resume(tiny, config, replace(to_state(there), tensors=tensors))
    torch.testing.assert_close(here.prefill(QUESTION), there.prefill(QUESTION).cpu(), rtol=1e-3, atol=1e-3)
