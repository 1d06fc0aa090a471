"""What only LLaVA-OneVision has: the newline behind the video, its tower's layers, its template and its sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.session import Session
from protokv.memories import MemoryConfig
from tests.backbones.tiny import LLAVA_SPECIAL, QWEN_TEMPLATE, write_llava_onevision, write_tokenizer
from tests.backbones.upstream import Upstream
from tests.conftest import random_frames
from tests.tolerance import near_logits

QUESTION = "where is the ring ?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava_onevision(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def backbone(folder: Path) -> Backbone:
    return load_backbone(str(folder), device="cpu", dtype="float32")


def assert_equals_the_whole_model(folder: Path, steps: list[np.ndarray]) -> None:
    backbone = load_backbone(str(folder), device="cpu", dtype="float32")
    session = Session.start(backbone, MemoryConfig.of("full", budget=64))
    for images in steps:
        session.watch(images)
    upstream = Upstream("llava_onevision", folder)
    expected = upstream.logits(upstream.inputs(steps, QUESTION, 2.0), len(backbone.suffix_ids(QUESTION)))
    torch.testing.assert_close(session.prefill(QUESTION), expected, **near_logits(session, expected))


@pytest.mark.parametrize(
    "variant",
    [
        {"feature_layer": [0, -2, -1]},
        {"tower": "clip_vision_model", "select": "default", "feature_layer": -2},
    ],
    ids=["several layers", "one layer without the class token"],
)
def test_the_features_are_those_that_the_config_names(tmp_path: Path, variant: dict[str, Any]) -> None:
    folder = write_llava_onevision(tmp_path, **variant)
    assert_equals_the_whole_model(folder, [random_frames(seed, 1) for seed in range(3)])


def test_at_the_real_frame_size_a_frame_is_196_tokens(tmp_path: Path) -> None:
    folder = write_llava_onevision(tmp_path, image_size=384)
    backbone = load_backbone(str(folder), device="cpu", dtype="float32")
    steps = [random_frames(seed, 1, 360, 640) for seed in range(2)]
    tokens = backbone.embed_step(steps[0])
    assert (tokens.grid, len(tokens.embeddings)) == ((14, 14), 196)
    assert backbone.settings == {"frame_height": 384, "frame_width": 384, "frame_tokens": 196}
    assert (backbone.default_fps, backbone.frames_per_step) == (0.5, 1)
    assert_equals_the_whole_model(folder, steps)


def test_the_processors_older_template_comes_before_that_of_a_text_only_tokenizer(
    folder: Path, backbone: Backbone, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    template = (copy / "chat_template.jinja").read_text()
    write_tokenizer(copy, LLAVA_SPECIAL, None)
    (copy / "chat_template.jinja").unlink()
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": QWEN_TEMPLATE}))
    older = load_backbone(str(copy), device="cpu", dtype="float32")
    assert older.prefix_ids == backbone.prefix_ids
    assert older.suffix_ids(QUESTION) == backbone.suffix_ids(QUESTION)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (random_frames(0, 2), r"got \[2, 60, 90, 3\] uint8"),
        (random_frames(0, 1)[..., :1], r"got \[1, 60, 90, 1\] uint8"),
        (random_frames(0, 1)[0], r"got \[60, 90, 3\] uint8"),
        (random_frames(0, 1) / 255, r"got \[1, 60, 90, 3\] float64"),
        (random_frames(0, 1)[:, :0], r"got \[1, 0, 90, 3\] uint8"),
    ],
    ids=["two frames", "one channel", "no frame axis", "not bytes", "no rows"],
)
def test_images_of_another_shape_than_one_step_are_refused(backbone: Backbone, images: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=rf"a step is \[1, height, width, 3\] uint8 RGB, {said}"):
        backbone.embed_step(images)
