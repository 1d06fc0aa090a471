"""Frames to patches as the Qwen vision towers take them, with PIL and torch alone.

transformers' own video processors need torchvision; its PIL image processor does the same arithmetic and is what the
tests compare with. Owns resizing, normalising and the order of patches; knows nothing of models.

Frames of one fixed size for towers such as SigLIP and CLIP, with PIL and torch alone.

transformers' video processor of LLaVA-OneVision resizes every frame to the size of its settings, without regard to the
aspect ratio and without the tiles that still images are cut into, then rescales and normalises. It needs torchvision.
The tests compare with its PIL image processors: that of SigLIP, and the first tile of LLaVA-OneVision's, which is the
whole image. Both give the same bytes. torch's bicubic kernel, which the video processor calls through torchvision, does
not round to bytes between its two passes as PIL does: on real frames its bytes differ by a level or two.

What the Qwen families share about a step: its frames are checked, its visual tokens stand at (time, row, column).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from protokv.core.step import StepPositions, StreamClock
from protokv.errors import ModelError, SourceUnreadable

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


# The only steps that are implemented; a preprocessor file that asks for others is refused.
_STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_center_crop": False}


@dataclass(frozen=True, slots=True)
class FrameConfig:
    """How frames are prepared; the defaults are those of transformers' video processor of LLaVA-OneVision.

    Attributes:
        height, width: pixels of a resized frame.
        mean, std: per channel, of values in [0, 1].
        rescale: the factor that brings bytes to [0, 1].
        resample: PIL's number of the resampling filter.
    """

    height: int = 384
    width: int = 384
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale: float = 1 / 255
    resample: int = 3

    @classmethod
    def from_files(cls, raw: dict[str, Any]) -> FrameConfig:
        """From the dictionary of a preprocessor file.

        Raises:
            ModelError: it asks for something else than frames of one size, rescaled and normalised.
        """
        default = cls()
        size = raw.get("size") or {"height": default.height, "width": default.width}
        if not {"height", "width"} <= size.keys():
            raise ModelError(f"the video processor asks for frames of {size}, expected a height and a width")
        for name, value in _STEPS.items():
            if raw.get(name) not in (None, value):
                raise ModelError(f"the video processor asks for {name} = {raw[name]}, which is not supported")
        return cls(
            height=size["height"],
            width=size["width"],
            mean=tuple(raw.get("image_mean", default.mean)),
            std=tuple(raw.get("image_std", default.std)),
            rescale=raw.get("rescale_factor", default.rescale),
            resample=raw.get("resample", default.resample),
        )


def normalise(images: np.ndarray[Any, np.dtype[np.uint8]], config: FrameConfig) -> Tensor:
    """Resize and normalise RGB frames `[F, height, width, 3]` uint8 of any size.

    Returns:
        `[F, 3, config.height, config.width]` float32.
    """
    size = (config.width, config.height)
    filter = Image.Resampling(config.resample)
    resized = np.stack([np.asarray(Image.fromarray(image).resize(size, resample=filter)) for image in images])
    pixels = torch.from_numpy(resized).permute(0, 3, 1, 2).float() * config.rescale
    mean, std = (torch.tensor(v)[:, None, None] for v in (config.mean, config.std))
    return (pixels - mean) / std


def check_images(images: np.ndarray[Any, Any], frames: int) -> None:
    """Refuse what is not one step of RGB frames.

    Raises:
        ValueError: it is not `[frames, height, width, 3]` uint8 with at least one pixel.
    """
    shape = images.shape
    if images.dtype != np.uint8 or len(shape) != 4 or (shape[0], shape[3]) != (frames, 3) or 0 in shape:
        raise ValueError(f"a step is [{frames}, height, width, 3] uint8 RGB, got {list(shape)} {images.dtype}")


def place_on_grid(
    grid: tuple[int, int], origin: int, index: int, time_s: float, per_second: float | None, device: torch.device
) -> StepPositions:
    """(t, h, w) of every token of a step, each component from `origin`.

    Args:
        grid: rows and columns of its tokens.
        origin: position of the first token behind the prompt prefix.
        index: number of the step.
        time_s: stream time of its first frame.
        per_second: positions a second; None counts steps.
        device: of the positions.
    """
    # The small term undoes the rounding of sums such as 3 * 0.1; transformers truncates likewise.
    t = index if per_second is None else int(time_s * per_second + 1e-6)
    rows, columns = grid
    highest = (origin + t, origin + rows - 1, origin + columns - 1)
    return StepPositions(origin + cells(grid, t, device), highest)


def times_on_grid(positions: Tensor, origin: int, per_second: float | None, clock: StreamClock) -> Tensor:
    """The inverse of `place_on_grid`: times within the steps at `positions` `[..., 3]`, seconds, `[...]` float64.

    Times were rounded down to positions, so a step began after its position's own time and before the next one's.
    """
    t = positions[..., 0].double() - origin
    if per_second is None:
        return (t + 0.5) * clock.step_seconds
    # Late enough to be in a step that began between two positions, early enough for one that began on its own.
    return t / per_second + 0.999 * min(1 / per_second, clock.step_seconds)


def cells(grid: tuple[int, int], t: int, device: torch.device) -> Tensor:
    """(t, row, column) of every visual token in raster order, `[rows * columns, 3]` int64."""
    rows, columns = grid
    cell = torch.arange(rows * columns, device=device)
    return torch.stack([torch.full_like(cell, t), cell // columns, cell % columns], dim=-1)
