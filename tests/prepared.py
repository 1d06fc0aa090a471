"""A source of prepared random frames, which needs no decoder."""

from collections.abc import Iterator
from typing import Self

import numpy as np

from protokv.video import Frame, SourceDamage, SourceInfo
from protokv.video.source import drop_frames_before

RATE = 2.0


class Prepared:
    """A source of `n_frames` random frames, two a second; the seed makes it differ from others."""

    damage = SourceDamage()
    texts = ()
    notes = ()

    def __init__(self, seed: int, n_frames: int) -> None:
        self._seed = seed
        self._n = n_frames
        sizes = {"width": 48, "height": 32, "rotation": 0, "rate_fps": RATE, "size_bytes": 0}
        named = {
            "name": f"{seed}.mp4",
            "kind": "file",
            "fingerprint": f"{seed}/{n_frames}",
            "pixel_format": "rgb24",
        }
        unread = dict.fromkeys(("decoder", "container", "codec"), "none")
        self.info = SourceInfo(**named, **unread, **sizes, duration_s=n_frames / RATE)  # type: ignore[arg-type]

    def frames(self, start_s: float = 0.0, **_: object) -> Iterator[Frame]:
        def image(i: int) -> np.ndarray:
            return np.random.default_rng([self._seed, i]).integers(
                0, 256, (32, 48, 3), dtype=np.uint8
            )

        return drop_frames_before(
            (Frame(i / RATE, image(i), 1 / RATE) for i in range(self._n)), start_s
        )

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
