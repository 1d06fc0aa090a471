"""What only SmolVLM2 and InternVL have: a line of text in front of every frame, and frames of one size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from protokv.backbones import load_backbone
from protokv.backbones.smolvlm import SmolVLM
from protokv.core.backbone import Backbone
from protokv.core.session import Session
from protokv.errors import ModelError
from protokv.memories import MemoryConfig
from tests.backbones.tiny import BUILDERS, write_internvl, write_smolvlm
from tests.backbones.upstream import Upstream
from tests.conftest import random_frames
from tests.tolerance import near_logits

QUESTION = "where is the ring ?"


def load(folder: Path) -> Backbone:
    return load_backbone(str(folder), device="cpu", dtype="float32")


def assert_equals_the_whole_model(family: str, folder: Path, steps: list[np.ndarray], fps: float = 1.0) -> None:
    backbone, upstream = load(folder), Upstream(family, folder)
    session = Session.start(backbone, MemoryConfig.of("full", budget=64), fps=fps)
    for images in steps:
        session.watch(images)
    inputs, n_suffix = upstream.inputs(steps, QUESTION, 1 / fps), len(backbone.suffix_ids(QUESTION))
    assert session.clock.next_position + n_suffix == inputs["input_ids"].shape[1]
    expected = upstream.logits(inputs, n_suffix)
    torch.testing.assert_close(session.prefill(QUESTION), expected, **near_logits(session, expected))


def lines_of(family: str, folder: Path, times_s: list[float]) -> list[str]:
    """Return the text of steps at these times, without their visual tokens."""
    backbone, tokenizer = load(folder), Upstream(family, folder).tokenizer
    names = {backbone.embed_text([i])[0].numpy().tobytes(): name for name, i in tokenizer.get_vocab().items()}
    lines = []
    for time_s in times_s:
        tokens = backbone.embed_step(random_frames(0, 1), time_s)
        text = torch.cat((tokens.embeddings[: tokens.visual.start], tokens.embeddings[tokens.visual.stop :]))
        lines.append(tokenizer.convert_tokens_to_string([names[row.numpy().tobytes()] for row in text]))
    return lines


@pytest.mark.parametrize("fps", [0.4, 3.0])
def test_at_any_rate_the_times_of_smolvlm_are_those_of_transformers(tmp_path: Path, fps: float) -> None:
    steps = [random_frames(seed, 1) for seed in range(4)]
    assert_equals_the_whole_model("smolvlm", write_smolvlm(tmp_path), steps, fps)


def test_internvl_with_the_other_language_model_equals_transformers(tmp_path: Path) -> None:
    # Eleven frames, so that a number has two digits.
    steps = [random_frames(seed, 1) for seed in range(11)]
    assert_equals_the_whole_model("internvl", write_internvl(tmp_path, language="qwen3"), steps)


def test_a_frame_of_smolvlm_says_minutes_and_seconds_however_late(tmp_path: Path) -> None:
    marks = "<fake_token_around_image><global-img><fake_token_around_image>"
    said = [f"\nFrame from {time}:{marks}" for time in ("00:00", "01:01", "100:00")]
    assert lines_of("smolvlm", write_smolvlm(tmp_path), [0.0, 61.9, 6000.0]) == said


def test_a_frame_of_internvl_says_its_number_at_the_default_rate(tmp_path: Path) -> None:
    said = ["Frame1: <img></img>", "\nFrame1: <img></img>", "\nFrame10: <img></img>", "\nFrame3601: <img></img>"]
    assert lines_of("internvl", write_internvl(tmp_path), [0.0, 0.5, 9.0, 3600.0]) == said


@pytest.mark.parametrize(
    ("family", "published", "grid"),
    [
        ("smolvlm", {"image_size": 512, "patch": 16, "scale": 4}, (8, 8)),
        ("smolvlm", {"image_size": 384, "patch": 14, "scale": 3}, (9, 9)),
        ("internvl", {"image_size": 448, "patch": 14}, (16, 16)),
    ],
    ids=["SmolVLM2 256M and 500M", "SmolVLM2 2.2B", "InternVL"],
)
def test_at_the_published_sizes_a_frame_has_the_published_tokens(
    tmp_path: Path, family: str, published: dict[str, int], grid: tuple[int, int]
) -> None:
    backbone = load(BUILDERS[family](tmp_path, **published))
    tokens = backbone.embed_step(random_frames(0, 1, 90, 160))
    assert (tokens.grid, tokens.visual.stop - tokens.visual.start) == (grid, grid[0] * grid[1])
    assert backbone.settings["frame_tokens"] == grid[0] * grid[1]


def test_frames_of_smolvlm_have_the_size_for_video_where_a_file_has_one() -> None:
    square = {"max_image_size": {"longest_edge": 512}}
    still = square | {"size": {"longest_edge": 2048}}
    sampling = {"video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 384}}}
    for raw, of_video, size in [
        (still | sampling, False, 384),
        (still | sampling, True, 384),
        (still, False, 512),
        (still, True, 2048),
        ({}, False, 364),
    ]:
        frames = SmolVLM.make_frames(raw, of_video)
        assert (frames.size["longest_edge"], frames.do_image_splitting) == (size, False)
        assert frames.resample == SmolVLMImageProcessorPil.resample


def test_a_preparation_of_frames_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = BUILDERS["smolvlm"](tmp_path) / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_normalize": False}))
    with pytest.raises(ModelError, match="do_normalize"):
        load_backbone(str(file.parent), device="cpu")
