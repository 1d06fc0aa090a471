"""What only Qwen3-VL has: a time before every step, features for the first layers, and pixel limits of whole videos."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as upstream_resize

from protokv.backbones import load_backbone
from protokv.backbones.pixels import PixelConfig, smart_resize
from protokv.core.backbone import Backbone
from protokv.core.session import Session
from protokv.core.step import StreamClock
from protokv.memories import MemoryConfig
from tests.backbones.tiny import write_qwen3_vl
from tests.backbones.upstream import Upstream
from tests.conftest import random_frames
from tests.tolerance import near_logits

QUESTION = "what is the first star ?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def backbone(folder: Path) -> Backbone:
    return load_backbone(str(folder), device="cpu", dtype="float32")


def stamp_of(backbone: Backbone, folder: Path, time_s: float) -> list[str]:
    """Return the text in front of a step's visual tokens, token by token."""
    tokens = backbone.embed_step(random_frames(0), time_s)
    vocabulary = Upstream("qwen3_vl", folder).tokenizer.get_vocab()
    names = {backbone.embed_text([i])[0].numpy().tobytes(): name for name, i in vocabulary.items()}
    return [names[row.numpy().tobytes()] for row in tokens.embeddings[: tokens.visual.start]]


@pytest.mark.parametrize("fps", [0.5, 1.0, 3.0])
def test_at_any_rate_the_logits_are_those_of_the_whole_model(backbone: Backbone, folder: Path, fps: float) -> None:
    upstream = Upstream("qwen3_vl", folder)
    steps = [random_frames(seed) for seed in range(4)]
    session = Session.start(backbone, MemoryConfig.of("full", budget=64), fps=fps)
    for images in steps:
        session.watch(images)
    inputs = upstream.inputs(steps, QUESTION, 2 / fps)
    n_suffix = len(backbone.suffix_ids(QUESTION))
    expected = upstream.logits(inputs, n_suffix)
    torch.testing.assert_close(session.prefill(QUESTION), expected, **near_logits(session, expected))
    named = (inputs["input_ids"], inputs["mm_token_type_ids"], None, inputs["video_grid_thw"])
    positions = upstream.model.model.get_rope_index(*named)[0]
    assert session.clock.next_position + n_suffix == int(positions.max()) + 1


def test_the_time_of_a_step_is_the_mean_over_its_frames_to_a_tenth(backbone: Backbone, folder: Path) -> None:
    assert stamp_of(backbone, folder, 0.25) == ["<", "0", ".", "2", "seconds", ">", "<|vision_start|>"]
    session, times = Session.start(backbone, MemoryConfig.of("full"), fps=4.0), []
    embed = backbone.embed_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbone, "embed_steps", lambda steps, at: times.extend(at) or embed(steps, at))
        session.watch(random_frames(0))
        session.watch(random_frames(1))
        session.watch(random_frames(2), time_s=100.0)
    assert times == [0.125, 0.625, 100.125]


@given(
    height=st.integers(32, 2400),
    width=st.integers(32, 4000),
    shortest=st.sampled_from([2048, 4096, 200_000]),
    longest=st.sampled_from([60_000, 400_000, 25_165_824]),
)
def test_frames_get_the_size_that_the_processor_gives_a_video_of_one_step(
    height: int, width: int, shortest: int, longest: int
) -> None:
    # As in `Qwen3VLVideoProcessor.resize` with `cap_pixels_per_frame`, for two frames.
    cap = max(min(768 * 32 * 32, longest // 2), int(shortest * 1.05))
    expected = upstream_resize(2, height, width, 2, 32, shortest, 2 * cap)
    ours = PixelConfig(patch_size=16, min_pixels=shortest // 2, max_pixels=cap)
    assert smart_resize(height, width, ours) == expected


def test_a_position_tells_the_step_that_stands_there(backbone: Backbone) -> None:
    origin = start = len(backbone.prefix_ids)
    places = []
    for index in range(4):
        tokens = backbone.embed_step(random_frames(index), 2.0 * index + 0.5)
        stands = backbone.step_positions(tokens, origin=origin, start=start, index=index, time_s=2.0 * index)
        start = max(stands.highest) + 1
        places.append(stands.positions)
    clock = StreamClock(4, 8.0, start, 0, 1.0, 2)
    for index, where in enumerate(places):
        assert ((backbone.stream_times(where, clock) / 2).floor() == index).all()
