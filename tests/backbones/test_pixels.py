"""Frames become the patches that transformers' own PIL processor makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_resize

from protokv.backbones.pixels import PixelConfig, patchify, smart_resize
from protokv.errors import SourceUnreadable
from tests.backbones.pictures import picture, sample_frames
from tests.tolerance import near


def assert_pixels(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # A pixel is scaled, a mean taken off and divided by a deviation.
    torch.testing.assert_close(ours, theirs, **near(theirs, 3))


@pytest.mark.parametrize(
    ("height", "width", "low", "high"),
    [
        (1, 150, 3136, 60000),
        (84, 84, 7056, 7056),
        (360, 640, 3136, 60000),
        (641, 361, 3136, 60000),
        (9, 5, 3136, 60000),
        (2160, 3840, 100352, 602112),
    ],
    ids=lambda v: str(v),
)
def test_patches_equal_those_of_transformers(height: int, width: int, low: int, high: int) -> None:
    config = PixelConfig(min_pixels=low, max_pixels=high)
    image = picture(height, width)
    patches, (rows, columns) = patchify(np.stack([image, image]), config)
    theirs = Qwen2VLImageProcessorPil(size={"shortest_edge": low, "longest_edge": high})
    expected = theirs(images=[image], input_data_format="channels_last", return_tensors="pt")
    assert expected["image_grid_thw"].tolist() == [[1, rows * 2, columns * 2]]
    assert_pixels(patches, expected["pixel_values"])


def test_patches_of_a_real_video_equal_those_of_transformers() -> None:
    config = PixelConfig()
    theirs = Qwen2VLImageProcessorPil(size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels})
    for image in sample_frames():
        patches, _ = patchify(np.stack([image, image]), config)
        expected = theirs(images=[image], return_tensors="pt")["pixel_values"]
        assert_pixels(patches, expected)


def test_a_gray_frame_has_equal_channels_up_to_their_normalisation() -> None:
    config = PixelConfig(mean=(0.5,) * 3, std=(0.5,) * 3)
    image = picture(200, 300)[..., :1].repeat(3, axis=2)
    red, green, blue = patchify(np.stack([image, image]), config)[0].reshape(-1, 3, 2 * 14 * 14).unbind(1)
    assert torch.equal(red, green)
    assert torch.equal(red, blue)


def test_the_two_frames_of_a_patch_keep_their_order() -> None:
    config = PixelConfig(min_pixels=7056, max_pixels=7056)
    first, second = np.zeros((84, 84, 3), np.uint8), np.full((84, 84, 3), 255, np.uint8)
    patches, _ = patchify(np.stack([first, second]), config)
    by_frame = patches.reshape(-1, 3, 2, 14, 14)
    assert (by_frame[:, :, 0] < 0).all()
    assert (by_frame[:, :, 1] > 0).all()


@pytest.mark.parametrize("height", [1, 7, 28, 99, 719, 2160])
@pytest.mark.parametrize("width", [1, 31, 120, 1280])
def test_sizes_follow_transformers(height: int, width: int) -> None:
    config = PixelConfig()
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(SourceUnreadable, match=f"{width} x {height}"):
            smart_resize(height, width, config)
        return
    expected = reference_resize(height, width, 28, config.min_pixels, config.max_pixels)
    assert smart_resize(height, width, config) == expected


def test_both_spellings_of_the_pixel_limits_are_read() -> None:
    old = PixelConfig.from_files({"min_pixels": 3136, "max_pixels": 7056})
    new = PixelConfig.from_files({"size": {"shortest_edge": 3136, "longest_edge": 7056}})
    assert old == new == PixelConfig(min_pixels=3136, max_pixels=7056)
