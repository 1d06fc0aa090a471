"""What a frame costs: the tokens that each family's published processor gives it, and no more than
a user allows.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    get_aspect_ratio_preserving_size as gemma_resize,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen2_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_resize

from protokv.backbones import load_backbone
from protokv.backbones.files import read_video_processor
from protokv.backbones.gemma4 import GEMMA4_VIDEO_SETTINGS, Gemma4
from protokv.backbones.pixels import PreprocessorConfig, smart_resize
from protokv.backbones.qwen3_vl import Qwen3VL
from protokv.backbones.qwen_vl import QwenVL
from protokv.core.backbone import Backbone
from protokv.errors import ConfigError, StateMismatch
from protokv.ingestion import ingest
from protokv.memories import DurableConfig
from protokv.stream.opening import load
from protokv.texts import JsonObject, Keywords
from tests.backbones.tiny import BUILDERS, write_json
from tests.conftest import random_frames
from tests.prepared import Prepared

# Widths and heights.
SIZES = [
    (176, 144),
    (320, 240),
    (640, 360),
    (1280, 720),
    (1920, 1080),
    (3840, 2160),
    (720, 1280),
    (1920, 120),
    (20, 16),
    (641, 363),
]
# The files of the published models.
STILL = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
OF_VIDEO = {
    "size": {"shortest_edge": 4096, "longest_edge": 25_165_824},
    "patch_size": 16,
    "merge_size": 2,
}
OF_IMAGES = {
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "merge_size": 2,
}


# What transformers' arithmetic gives under the limits of `Qwen2VLVideoProcessor` and of
# qwen-vl-utils. The processor of Qwen3-VL counts the pixels of both frames of a step.
QWEN2 = partial(qwen2_resize, factor=28, min_pixels=128 * 28**2, max_pixels=768 * 28**2)
QWEN3 = partial(
    qwen3_resize, 2, temporal_factor=2, factor=32, min_pixels=256 * 32**2, max_pixels=1536 * 32**2
)


@pytest.mark.parametrize(
    ("family", "side", "resize", "files"),
    [
        (QwenVL, 28, QWEN2, {"preprocessor": STILL}),
        # transformers saves it so.
        (QwenVL, 28, QWEN2, {"preprocessor": STILL, "video_preprocessor": STILL}),
        (Qwen3VL, 32, QWEN3, {"preprocessor": OF_IMAGES, "video_preprocessor": OF_VIDEO}),
    ],
)
def test_a_frame_for_qwen_has_the_tokens_of_its_utilities(
    family: type[QwenVL], side: int, resize: Any, files: JsonObject, tmp_path: Path
) -> None:
    for name, content in files.items():
        write_json(tmp_path, f"{name}_config", content)
    pixels = family.make_frames(*read_video_processor(str(tmp_path)))
    assert pixels.token_side == side
    for width, height in SIZES:
        assert smart_resize(height, width, pixels) == resize(height=height, width=width)


def test_a_frame_for_gemma_has_the_tokens_of_its_processor() -> None:
    gemma = object.__new__(Gemma4)
    gemma._frames = Gemma4ImageProcessorPil(**GEMMA4_VIDEO_SETTINGS)
    for width, height in SIZES:
        rows, columns = gemma_resize(height, width, 16, 70 * 9, 3)
        assert gemma.prepare(np.zeros((1, height, width, 3), np.uint8)).grid == (
            rows // 48,
            columns // 48,
        )


@given(
    size=st.tuples(st.integers(1, 2400), st.integers(1, 4000)).filter(
        lambda size: max(size) <= 200 * min(size)
    ),
    limit=st.integers(28 * 28, 2000 * 28 * 28),
)
def test_no_frame_costs_more_than_its_limit_and_a_cheaper_one_keeps_its_size(
    size: tuple[int, int], limit: int
) -> None:
    usual = replace(PreprocessorConfig(), max_pixels=max(limit, 768 * 28 * 28))
    rows, columns = smart_resize(*size, PreprocessorConfig().with_maximum(limit))
    assert min(rows, columns) >= 28
    assert rows * columns <= limit
    before = smart_resize(*size, usual)
    if before[0] * before[1] <= limit:
        assert (rows, columns) == before


def loaded(folder: Path, **cost: Any) -> Backbone:
    return load_backbone(str(folder), device="cpu", dtype="float32", **cost)


def test_a_state_brings_its_cost_and_takes_no_other(
    tiny: Backbone, tiny_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "s.safetensors"

    def watch(source: Prepared, **cost: int) -> int:
        config = DurableConfig(budget=64)
        how: Keywords = {"backbone": str(tiny_folder), "device": "cpu", **cost}
        return ingest(source, path, config, append=True, **how).steps

    assert watch(Prepared(1, 4), frame_tokens=5) == 2
    backbone = load(path, str(tiny_folder), device="cpu").backbone
    assert backbone.settings["frame_tokens"] == 5
    assert backbone.identity == tiny.identity
    step = random_frames(0, 2, 600, 900)
    assert np.prod(backbone.prepare(step).grid) <= 5 < np.prod(tiny.prepare(step).grid)
    source = Prepared(2, 4)
    with pytest.raises(StateMismatch, match=r"its \w+ is \d+, this run's is \d+"):
        watch(source, frame_tokens=7)
    # Without a cost, the state's.
    assert (watch(source), watch(Prepared(3, 4), frame_tokens=5)) == (4, 6)


def test_gemma_takes_the_numbers_that_its_processor_knows(tmp_path: Path) -> None:
    folder = BUILDERS["gemma4"](tmp_path)
    backbone = loaded(folder, frame_tokens=140)
    step = backbone.prepare(random_frames(0, 1, 300, 400))
    assert 70 < np.prod(step.grid) <= 140
    assert backbone.settings["frame_tokens"] == 140
    backbone.embed_steps([step], [0.0])
    with pytest.raises(ConfigError, match="at most 70, 140, 280, 560, 1120 visual tokens"):
        backbone.limit_frames(100)


def test_a_cost_that_a_model_cannot_have_is_refused(tiny: Backbone, tmp_path: Path) -> None:
    for tokens in (0, 10):
        with pytest.raises(ConfigError, match="has 9 visual tokens"):
            load_backbone("protokv/mini", frame_tokens=tokens)
    with pytest.raises(ConfigError, match="has 4 visual tokens, and no other number"):
        loaded(BUILDERS["smolvlm"](tmp_path), frame_tokens=4).limit_frames(5)
    with pytest.raises(ConfigError, match="a frame of 0 tokens"):
        tiny.limit_frames(0)
