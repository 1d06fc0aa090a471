"""Frames for the tests of preprocessing: smooth and sharp at once, and real ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from protokv.video import open_source, sample

SAMPLES = Path(__file__).parents[2] / "samples"


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Noise over a gradient, `[height, width, 3]` uint8."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, width, dtype=np.float32)[None, :, None]
    return (ramp + rng.integers(0, 55, (height, width, 3))).astype(np.uint8)


def sample_frames(n_frames: int = 3) -> Iterator[np.ndarray]:
    """Frames of each of the sample videos, two a second."""
    for path in sorted(SAMPLES.glob("*/video.mp4")):
        with open_source(path) as source:
            for taken in islice(sample(source.frames(), fps=2.0), n_frames):
                yield taken.image
