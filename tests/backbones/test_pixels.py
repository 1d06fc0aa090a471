"""Frames become the patches of transformers' own PIL processor for Qwen; frames of no one size are
refused.
"""

import re

import numpy as np
import pytest
from torch import Tensor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from protokv.backbones.pixels import (
    PreprocessorConfig,
    check_image_arrays,
    make_image_processor,
    patchify,
    smart_resize,
)
from protokv.errors import ModelError, SourceUnreadable
from tests.tolerance import check_near


def picture(height: int, width: int) -> np.ndarray:
    """Noise over a gradient, `[height, width, 3]` uint8: smooth and sharp at once."""
    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 200, width, dtype=np.float32)[None, :, None]
    return (ramp + rng.integers(0, 55, (height, width, 3))).astype(np.uint8)


SHAPES = [(1, 150), (84, 84), (360, 640), (641, 361), (9, 5), (1080, 31), (720, 1280)]


@pytest.mark.parametrize(("height", "width"), SHAPES, ids=str)
@pytest.mark.parametrize(("low", "high"), [(3136, 60000), (7056, 7056)], ids=["range", "one size"])
def test_patches_equal_those_of_transformers(height: int, width: int, low: int, high: int) -> None:
    image = picture(height, width)
    patches, (rows, columns) = patchify(
        np.stack([image, image]), PreprocessorConfig(min_pixels=low, max_pixels=high)
    )
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": low, "longest_edge": high})
    found = processor(images=[image], input_data_format="channels_last", return_tensors="pt")
    expected: Tensor = found["pixel_values"]
    assert found["image_grid_thw"].tolist() == [[1, rows * 2, columns * 2]]
    # A pixel is scaled, a mean taken off and divided by a deviation.
    check_near(patches, expected, 3)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 60, 90, 3), "uint8"),
        ((1, 60, 90, 1), "uint8"),
        ((60, 90, 3), "uint8"),
        ((1, 60, 90, 3), "float64"),
        ((1, 0, 90, 3), "uint8"),
    ],
)
def test_what_is_no_picture_of_a_step_is_refused(shape: tuple[int, ...], dtype: str) -> None:
    said = re.escape(f"a step is [1, height, width, 3] uint8 RGB, got {list(shape)} {dtype}")
    with pytest.raises(ValueError, match=said):
        check_image_arrays(np.zeros(shape, dtype), 1)


def test_frames_that_are_too_narrow_are_refused() -> None:
    with pytest.raises(SourceUnreadable, match="1280 x 6"):
        smart_resize(6, 1280, PreprocessorConfig())


def test_a_file_without_settings_means_those_of_the_video_processor() -> None:
    ours = make_image_processor({})
    Theirs = LlavaOnevisionImageProcessorPil
    assert (tuple(ours.image_mean), tuple(ours.image_std)) == (
        tuple(Theirs.image_mean),
        tuple(Theirs.image_std),
    )
    assert {name: ours.size[name] for name in ("height", "width")} == Theirs.size
    assert ours.resample == Theirs.resample


def test_steps_are_those_of_the_file_and_frames_of_no_one_size_are_refused() -> None:
    size = {"height": 16, "width": 16}
    ours = make_image_processor(
        {"size": size, "do_normalize": False, "do_center_crop": True, "crop_size": size}
    )
    found = ours(images=[picture(32, 32)], input_data_format="channels_last", return_tensors="pt")[
        "pixel_values"
    ]
    assert found.shape == (1, 3, 16, 16)
    assert 0 <= found.min() < found.max() <= 1
    with pytest.raises(ModelError, match=r"the video processor asks for .*shortest_edge"):
        make_image_processor({"size": {"shortest_edge": 384}})
