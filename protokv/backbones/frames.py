"""Frames of one fixed size for towers such as SigLIP and CLIP, with PIL and torch alone.

transformers' video processor of LLaVA-OneVision resizes every frame to the size of its settings, without regard to the
aspect ratio and without the tiles that still images are cut into, then rescales and normalises. It needs torchvision.
The tests compare with its PIL image processors: that of SigLIP, and the first tile of LLaVA-OneVision's, which is the
whole image. Both give the same bytes. torch's bicubic kernel, which the video processor calls through torchvision, does
not round to bytes between its two passes as PIL does: on real frames its bytes differ by a level or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from protokv.errors import ModelError

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
