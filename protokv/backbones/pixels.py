"""Frames for vision towers: patches for those of Qwen with their positions, and frames of one size
for the others.

Resizing, normalising and the order of patches do the arithmetic of transformers' PIL image
processors (the tests compare with them); its video processors need torchvision. torch's bicubic
kernel does not round to bytes between its two passes as PIL does: it differs by a level or two.

A frame of a video has 128 to 768 tokens: the limits of the families' own utilities
(`VIDEO_MIN_TOKEN_NUM` and `VIDEO_MAX_TOKEN_NUM` in https://github.com/QwenLM/Qwen3-VL,
qwen-vl-utils/src/qwen_vl_utils/vision_process.py) and of transformers' video processors. The files
of Qwen2-VL and Qwen2.5-VL have the limits of still images instead, 4 to 16,384 tokens, those of
Qwen3-VL and Qwen3.5 limits of all frames together, 4 to 24,576. A stream has no length, so the
limits of a frame stand alone: they are what a short video gets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protokv.core.backbone import Backbone, PreparedStep, check_tokens_per_frame
from protokv.core.step import Grid, Images, StepPositions, StepTokens, StreamClock
from protokv.errors import ConfigError, ModelError, SourceUnreadable
from protokv.texts import JsonObject

_MAX_ASPECT_RATIO = 200
# Limits of a frame of a video, in tokens.
_FEWEST_TOKENS = 128
MOST_FRAME_TOKENS = 768


@dataclass(frozen=True, slots=True)
class PreprocessorConfig:
    """Settings of the preparation of frames of a Qwen family, read from its preprocessor files."""

    patch_size: int = 14  # pixels per side of a patch
    merge_size: int = 2  # patches per side of a token
    temporal_patch_size: int = 2  # frames per token
    min_pixels: int = _FEWEST_TOKENS * 28 * 28  # area of a resized frame
    max_pixels: int = MOST_FRAME_TOKENS * 28 * 28
    # per channel, for values in [0, 1]
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    resample: int = 3  # PIL's number of the resampling filter
    # no frame exceeds `max_pixels`; the published rounding may, under a low limit
    strict: bool = False

    @classmethod
    def from_files(cls, raw: JsonObject) -> PreprocessorConfig:
        """Read the dictionary of a preprocessor file, with the older or newer names of the pixel
        limits.
        """
        size = raw.get("size") or {}
        default = cls()
        same = ("patch_size", "merge_size", "temporal_patch_size", "resample")
        return cls(
            **{name: raw[name] for name in same if name in raw},
            min_pixels=raw.get("min_pixels") or size.get("shortest_edge") or default.min_pixels,
            max_pixels=raw.get("max_pixels") or size.get("longest_edge") or default.max_pixels,
            mean=tuple(raw.get("image_mean", default.mean)),
            std=tuple(raw.get("image_std", default.std)),
        )

    @property
    def token_side(self) -> int:
        """Pixels per side of a token."""
        return self.patch_size * self.merge_size

    def for_video(self) -> PreprocessorConfig:
        """Return the limits of a frame of a video, as the families' utilities have them, inside
        those of the files.

        The maximum is a twentieth above the files' minimum at least, as there. Files whose own
        maximum is below the utilities' minimum keep their own minimum.
        """
        token = self.token_side**2
        most = min(self.max_pixels, max(MOST_FRAME_TOKENS * token, int(self.min_pixels * 1.05)))
        least = max(self.min_pixels, _FEWEST_TOKENS * token)
        return replace(self, min_pixels=least if least < most else self.min_pixels, max_pixels=most)

    def with_maximum(self, max_pixels: int) -> PreprocessorConfig:
        """Return the same with another maximum, that of a user, which no frame exceeds."""
        return replace(
            self, min_pixels=min(self.min_pixels, max_pixels), max_pixels=max_pixels, strict=True
        )

    def settings(self, fps: float) -> dict[str, int | float | str]:
        """Return the settings that a state records; `fps` is the sampling rate."""
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {"frames_per_step": self.temporal_patch_size, "fps": fps, **limits}


def smart_resize(height: int, width: int, config: PreprocessorConfig) -> tuple[int, int]:
    """Return height and width in multiples of a token's side, near the aspect ratio, with the area
    inside the limits.

    SourceUnreadable: the frame is more than 200 times as long as it is wide.
    """
    factor = config.token_side
    if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
        raise SourceUnreadable(
            f"frames of {width} x {height} pixels are too narrow: a side may be "
            f"{_MAX_ASPECT_RATIO} times the other",
            hint="crop or rescale the video first",
        )
    rows = round(height / factor) * factor
    columns = round(width / factor) * factor
    if rows * columns > config.max_pixels:
        scale = math.sqrt(height * width / config.max_pixels)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif rows * columns < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (height * width))
        rows = math.ceil(height * scale / factor) * factor
        columns = math.ceil(width * scale / factor) * factor
    if config.strict and rows * columns > config.max_pixels:
        most = config.max_pixels // factor**2
        scale = math.sqrt(height * width / most)
        rows = min(most, max(1, math.floor(height / scale)))
        columns = min(most // rows, max(1, math.floor(width / scale)))
        rows = rows * factor
        columns = columns * factor
    return rows, columns


def patchify(images: Images, config: PreprocessorConfig) -> tuple[Tensor, Grid]:
    """Cut one temporal patch of frames `[temporal_patch_size, height, width, 3]` uint8 into flat
    patches.

    Returns:
        `[patches, 3 * temporal_patch_size * patch_size ** 2]` float32 in the order of the merged
        tokens, and the rows and columns of those tokens.
    """
    height, width = smart_resize(images.shape[1], images.shape[2], config)
    if images.shape[1:3] != (height, width):
        # Imported here, because a process that only asks questions needs no PIL.
        from PIL import Image

        images = np.stack(
            [
                np.asarray(Image.fromarray(one).resize((width, height), config.resample))
                for one in images
            ]
        )
    pixels = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(v)[None, :, None, None] for v in (config.mean, config.std))
    pixels = (pixels - mean) / std
    F, channels, *_ = pixels.shape
    p = config.patch_size
    m = config.merge_size
    rows = height // (p * m)
    columns = width // (p * m)
    blocks = pixels.reshape(F, channels, rows, m, p, columns, m, p)
    # rows, columns, patch row, patch column in the token, channel, frame, pixel row, pixel column
    patches = blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns * m * m, -1)
    return patches, (rows, columns)


def check_image_arrays(images: np.ndarray[Any, Any], frames: int) -> None:
    """Refuse images that are not `[frames, height, width, 3]` uint8 with at least one pixel.
    ValueError.
    """
    shape = images.shape
    if (
        images.dtype != np.uint8
        or len(shape) != 4
        or (shape[0], shape[3]) != (frames, 3)
        or 0 in shape
    ):
        raise ValueError(
            f"a step is [{frames}, height, width, 3] uint8 RGB, got {list(shape)} {images.dtype}"
        )


class GridBackbone(Backbone):
    """A backbone whose step is one temporal patch on a grid, at positions (t, h, w) that begin at
    one origin.
    """

    _pixels: PreprocessorConfig
    _tokens_per_second: float | None  # positions per second; None: one position per step

    def limit_frames(self, tokens: int) -> None:
        """Resize frames to at most so many tokens. A step of two frames has the tokens of one."""
        side = self._pixels.token_side
        most = self._pixels.max_pixels
        if self._pixels.min_pixels == most and not self._pixels.strict:
            check_tokens_per_frame(self.identity.name, [most // side**2], tokens)
        elif tokens < 1:
            raise ConfigError(
                f"a frame of {tokens} tokens shows nothing", hint="use a number above 0"
            )
        else:
            self._pixels = self._pixels.with_maximum(tokens * side**2)
            self.settings = self._pixels.settings(self.default_fps) | {"frame_tokens": tokens}

    def prepare(self, images: Images) -> PreparedStep:
        """Cut one temporal patch of frames into patches `[n, pixels]` float32."""
        check_image_arrays(images, self.frames_per_step)
        return PreparedStep(*patchify(images, self._pixels))

    def step_positions(
        self, tokens: StepTokens, *, origin: int, start: int, index: int, time_s: float
    ) -> StepPositions:
        """Return (t, h, w) of each token: time or patches since the start, row, column, from
        `origin`; words follow.
        """
        per_second = self._tokens_per_second
        # The small term undoes rounding errors of sums such as 3 * 0.1. transformers truncates,
        # too.
        t = index if per_second is None else int(time_s * per_second + 1e-6)
        rows, columns = tokens.grid
        highest = (origin + t, origin + rows - 1, origin + columns - 1)
        seen = origin + make_grid_positions(tokens.grid, t, self.device)
        if not tokens.words:
            return StepPositions(seen, highest)
        begin = max(start, max(highest) + 1)
        after = self.text_positions(begin, tokens.words)
        last = begin + tokens.words - 1
        return StepPositions(torch.cat((seen, after)), (last, last, last))

    def time_within(
        self, passed: Tensor, positions: Tensor, seconds: Tensor, clock: StreamClock
    ) -> Tensor:
        """Return times from the first component, which is time, rounded down."""
        if self._tokens_per_second is None:
            return (passed + 0.5) * clock.step_seconds
        # A step may have begun anywhere between its position and the next one; this time lies
        # within it in both cases.
        position_s = 1 / self._tokens_per_second
        return passed * position_s + 0.999 * min(position_s, clock.step_seconds)


def make_grid_positions(grid: Grid, t: int, device: torch.device) -> Tensor:
    """Return (t, row, column) of every visual token in raster order, `[rows * columns, 3]`
    int64.
    """
    rows, columns = grid
    cell = torch.arange(rows * columns, device=device)
    return torch.stack([torch.full_like(cell, t), cell // columns, cell % columns], dim=-1)


# Settings of the preparation of frames; the defaults are those of transformers' video processors.
_SETTINGS: JsonObject = {
    "size": {"height": 384, "width": 384},
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "resample": 3,
}
FILE_SETTINGS = (
    "image_mean",
    "image_std",
    "rescale_factor",
    "resample",
    "do_resize",
    "do_rescale",
    "do_normalize",
    "do_center_crop",
    "crop_size",
)
"""The settings that a processor takes from a file as they are."""


def make_image_processor(raw: JsonObject) -> Any:
    """Return the processor of frames of one size that a preprocessor file asks for. ModelError: of
    another form.
    """
    # This processor does what the video processor does to a frame, without torchvision.
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    settings = _SETTINGS | {
        name: raw[name] for name in ("size", *FILE_SETTINGS) if raw.get(name) not in (None, {})
    }
    if not {"height", "width"} <= settings["size"].keys():
        raise ModelError(
            f"the video processor asks for frames of {settings['size']}, expected a height and a "
            "width"
        )
    return SiglipImageProcessorPil(**settings)
