"""Frames of one size become the pixels of transformers' own processors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from protokv.backbones.frames import FrameConfig, normalise
from protokv.backbones.processor_files import read_template, read_video_processor
from protokv.errors import ModelError
from tests.backbones.pictures import picture, sample_frames
from tests.tolerance import near

SIGLIP = {"size": {"height": 384, "width": 384}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def whole_image(image: np.ndarray, settings: dict[str, object]) -> torch.Tensor:
    """The first tile of transformers' image processor: the whole image at the size of a tile."""
    processor = LlavaOnevisionImageProcessorPil(**settings)
    return processor(images=[image], input_data_format="channels_last", return_tensors="pt")["pixel_values"][0, 0]


def assert_pixels(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # A pixel is scaled, a mean taken off and divided by a deviation.
    torch.testing.assert_close(ours, theirs, **near(theirs, 3))


@pytest.mark.parametrize(
    ("height", "width"), [(384, 384), (360, 640), (641, 361), (9, 5), (1, 700), (1080, 31), (2160, 3840)], ids=str
)
def test_pixels_equal_those_of_transformers(height: int, width: int) -> None:
    image = picture(height, width)
    ours = normalise(image[None], FrameConfig.from_files(SIGLIP))
    assert ours.shape == (1, 3, 384, 384)
    assert_pixels(ours[0], whole_image(image, SIGLIP))


@pytest.mark.parametrize("resample", [0, 2, 3], ids=["nearest", "bilinear", "bicubic"])
def test_the_settings_of_the_file_are_those_in_use(resample: int) -> None:
    settings = {
        "size": {"height": 56, "width": 98},
        "image_mean": [0.1, 0.4, 0.7],
        "image_std": [0.2, 0.5, 0.9],
        "rescale_factor": 1 / 128,
        "resample": resample,
    }
    image = picture(111, 63)
    ours = normalise(image[None], FrameConfig.from_files(settings))[0]
    theirs = SiglipImageProcessorPil(**settings)(images=[image], return_tensors="pt")["pixel_values"][0]
    assert_pixels(ours, theirs)


def test_pixels_of_a_real_video_equal_those_of_transformers() -> None:
    for image in sample_frames():
        ours = normalise(image[None], FrameConfig.from_files(SIGLIP))[0]
        assert_pixels(ours, whole_image(image, SIGLIP))


def test_pixels_of_a_real_video_are_those_of_torchs_kernel_but_for_rounding() -> None:
    config = FrameConfig(mean=(0.0,) * 3, std=(1.0,) * 3, rescale=1.0)
    for image in sample_frames():
        ours = normalise(image[None], config)
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float()
        theirs = torch.nn.functional.interpolate(pixels, size=(384, 384), mode="bicubic", antialias=True)
        difference = (ours - theirs.round().clamp(0, 255)).abs()
        assert difference.max() <= 3
        assert difference.mean() < 0.3


def test_a_gray_frame_stays_gray() -> None:
    image = picture(90, 160)[..., :1].repeat(3, axis=2)
    ours = normalise(image[None], FrameConfig.from_files(SIGLIP))[0]
    assert torch.equal(ours[0], ours[1])
    assert torch.equal(ours[0], ours[2])


def test_a_file_without_settings_means_those_of_the_video_processor() -> None:
    ours, Theirs = FrameConfig.from_files({}), LlavaOnevisionImageProcessorPil
    assert (ours.mean, ours.std) == (tuple(Theirs.image_mean), tuple(Theirs.image_std))
    assert {"height": ours.height, "width": ours.width} == Theirs.size
    assert ours.resample == Theirs.resample


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": {"shortest_edge": 384}}, "shortest_edge"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"do_normalize": False}, "do_normalize"),
    ],
    ids=["shortest edge", "crop", "not normalised"],
)
def test_preprocessing_of_another_kind_is_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=f"the video processor asks for .*{named}"):
        FrameConfig.from_files(settings)


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def test_the_settings_for_video_come_before_those_for_images_the_newest_form_first(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert read_video_processor(path) == ({}, False)
    write(tmp_path, "preprocessor_config.json", {"resample": 1, "crop_size": None})
    assert read_video_processor(path) == ({"resample": 1}, False)
    write(tmp_path, "video_preprocessor_config.json", {"resample": 2})
    assert read_video_processor(path) == ({"resample": 2}, True)
    # Processors of transformers 4 wrote this file without the settings of their parts.
    write(tmp_path, "processor_config.json", {"num_image_tokens": 729})
    assert read_video_processor(path) == ({"resample": 2}, True)
    write(tmp_path, "processor_config.json", {"video_processor": {"resample": 3}})
    assert read_video_processor(path) == ({"resample": 3}, True)


def test_the_older_template_file_counts_unless_the_newer_is_there(tmp_path: Path) -> None:
    assert read_template(str(tmp_path)) is None
    write(tmp_path, "chat_template.json", {"chat_template": "older"})
    assert read_template(str(tmp_path)) == "older"
    (tmp_path / "chat_template.jinja").write_text("newer, which the tokenizer reads")
    assert read_template(str(tmp_path)) is None
