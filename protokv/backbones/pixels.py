"""Frames to patches as the Qwen vision towers take them, with PIL and torch alone.

transformers' own video processors need torchvision; its PIL image processor does the same arithmetic and is what the
tests compare with. Owns resizing, normalising and the order of patches; knows nothing of models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protokv.errors import SourceUnreadable

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class PixelConfig:
    """How a family prepares frames, from its preprocessor files.

    Attributes:
        patch_size, merge_size, temporal_patch_size: pixels per patch side, patches per token side, frames per token.
        min_pixels, max_pixels: area of a resized frame.
        mean, std: per channel, of values in [0, 1].
        resample: PIL's number of the resampling filter.
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    resample: int = 3

    @classmethod
    def from_files(cls, raw: dict[str, Any]) -> PixelConfig:
        """From the dictionary of a preprocessor file, in its older and newer spelling of the pixel limits."""
        size = raw.get("size") or {}
        default = cls()
        return cls(
            patch_size=raw.get("patch_size", default.patch_size),
            merge_size=raw.get("merge_size", default.merge_size),
            temporal_patch_size=raw.get("temporal_patch_size", default.temporal_patch_size),
            min_pixels=raw.get("min_pixels") or size.get("shortest_edge") or default.min_pixels,
            max_pixels=raw.get("max_pixels") or size.get("longest_edge") or default.max_pixels,
            mean=tuple(raw.get("image_mean", default.mean)),
            std=tuple(raw.get("image_std", default.std)),
            resample=raw.get("resample", default.resample),
        )

    def settings(self, fps: float) -> dict[str, int | float | str]:
        """What a state records of it, beside the rate at which frames are sampled."""
        return {
            "frames_per_step": self.temporal_patch_size,
            "fps": fps,
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
        }


def smart_resize(height: int, width: int, config: PixelConfig) -> tuple[int, int]:
    """Height and width nearest to the aspect ratio, multiples of a token's side, with the area inside the limits.

    Raises:
        SourceUnreadable: the frame is more than 200 times as long as it is wide.
    """
    factor = config.patch_size * config.merge_size
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise SourceUnreadable(
            f"frames of {width} x {height} pixels are too narrow: a side may be {MAX_ASPECT_RATIO} times the other",
            hint="crop or rescale the video first",
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > config.max_pixels:
        scale = math.sqrt(height * width / config.max_pixels)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif rows * columns < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (height * width))
        rows = math.ceil(height * scale / factor) * factor
        columns = math.ceil(width * scale / factor) * factor
    return rows, columns


def resize(image: np.ndarray[Any, np.dtype[np.uint8]], config: PixelConfig) -> np.ndarray[Any, Any]:
    """One RGB frame `[height, width, 3]` uint8 at the size the model takes."""
    rows, columns = smart_resize(image.shape[0], image.shape[1], config)
    if image.shape[:2] == (rows, columns):
        return image
    # Here, because who only asks questions prepares no frames.
    from PIL import Image

    picture = Image.fromarray(image).resize((columns, rows), resample=Image.Resampling(config.resample))
    return np.asarray(picture)


def patchify(images: np.ndarray[Any, np.dtype[np.uint8]], config: PixelConfig) -> tuple[Tensor, tuple[int, int]]:
    """One temporal patch of frames `[temporal_patch_size, height, width, 3]` as flat patches.

    Returns:
        `[patches, 3 * temporal_patch_size * patch_size ** 2]` float32 in the order of the merged tokens, and the
        rows and columns of those tokens.
    """
    frames = torch.from_numpy(np.stack([resize(image, config) for image in images]))
    pixels = frames.permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(v)[None, :, None, None] for v in (config.mean, config.std))
    pixels = (pixels - mean) / std
    F, channels, height, width = pixels.shape
    p, m = config.patch_size, config.merge_size
    rows, columns = height // (p * m), width // (p * m)
    blocks = pixels.reshape(F, channels, rows, m, p, columns, m, p)
    # rows, columns, patch row, patch column in the token, channel, frame, pixel row, pixel column
    patches = blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns * m * m, -1)
    return patches, (rows, columns)
