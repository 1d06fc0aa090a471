"""A source of prepared random frames, which needs no decoder."""

from collections.abc import Iterator

import numpy as np

from protokv.video import Frame, Source, SourceDamage, SourceInfo
from protokv.video.source import FrameRequest, Image, drop_frames_before

RATE = 2.0


class Prepared(Source):
    """A source of `n_frames` random frames, two a second; the seed makes it differ from others."""

    damage = SourceDamage()

    def __init__(self, seed: int, n_frames: int) -> None:
        self._seed = seed
        self._n = n_frames
        self.info = SourceInfo(
            name=f"{seed}.mp4",
            kind="file",
            decoder="none",
            container="none",
            codec="none",
            pixel_format="rgb24",
            width=48,
            height=32,
            rotation=0,
            rate_fps=RATE,
            duration_s=n_frames / RATE,
            size_bytes=0,
            fingerprint=f"{seed}/{n_frames}",
        )

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        def image(i: int) -> Image:
            return np.random.default_rng([self._seed, i]).integers(
                0, 256, (32, 48, 3), dtype=np.uint8
            )

        frames = (Frame(i / RATE, image(i), 1 / RATE) for i in range(self._n))
        return drop_frames_before(frames, wanted.start_s)

    def close(self) -> None:
        """Stay open: tests share one."""
