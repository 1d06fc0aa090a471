"""Frames of one size, whatever the video's: for vision towers that take a square.

transformers' video processors need torchvision. So an image processor that does the same to a frame with PIL takes its
place: one size without regard to the aspect ratio, rescaled and normalised. torch's bicubic kernel does not round to
bytes between its two passes as PIL does: it differs by a level or two.
"""

from __future__ import annotations

from typing import Any, Final

from protokv.errors import ModelError

# Settings of the preparation of frames; the defaults are those of transformers' video processors.
FRAMES: Final[dict[str, Any]] = {
    "size": {"height": 384, "width": 384},
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "rescale_factor": 1 / 255,
    "resample": 3,
}
# A file that asks for other steps is refused.
_STEPS: Final = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_center_crop": False}


def read_frames(raw: dict[str, Any]) -> Any:
    """Return the processor of frames that a preprocessor file, read as a dictionary, asks for.

    Raises:
        ModelError: it asks for anything but frames of one size, rescaled and normalised.
    """
    # What the video processor does to a frame, without torchvision.
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    settings = FRAMES | {name: raw[name] for name in FRAMES if raw.get(name) not in (None, {})}
    if not {"height", "width"} <= settings["size"].keys():
        raise ModelError(f"the video processor asks for frames of {settings['size']}, expected a height and a width")
    check_steps(raw)
    return SiglipImageProcessorPil(**settings)


def check_steps(raw: dict[str, Any]) -> None:
    """Refuse a preprocessor file that leaves out or adds a step. ModelError."""
    for name, value in _STEPS.items():
        if raw.get(name) not in (None, value):
            raise ModelError(f"the video processor asks for {name} = {raw[name]}, which is not supported")


def check_frame_size(height: int, width: int, side: int) -> None:
    """Refuse frames of another size than the vision tower takes, a square of `side` pixels. ModelError."""
    if (height, width) != (side, side):
        raise ModelError(
            f"the video processor makes frames of {width} x {height} pixels, "
            f"and the vision tower takes {side} x {side}",
            hint="use the preprocessor files that belong to the model",
        )
