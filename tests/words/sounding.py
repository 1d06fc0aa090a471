"""Clips with sound, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

RATE = 8000


def write_sounding(
    path: Path, bursts: Sequence[tuple[float, float]], seconds: int, codec: str = "pcm_s16le", *, late_s: float = 0.0
) -> Path:
    """Write a clip of gray frames with a tone from and to these seconds, and silence else.

    The sound has no samples before `late_s`.
    """
    samples = np.zeros(seconds * RATE, np.int16)
    for n, (from_s, to_s) in enumerate(bursts):
        where = np.arange(round(from_s * RATE), round(to_s * RATE))
        samples[where] = 8000 * np.sin(where * (0.2 + 0.01 * n))
    with av.open(str(path), "w") as output:
        video: Any = output.add_stream("libx264", rate=4)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        sound: Any = output.add_stream(codec, rate=RATE)
        sound.layout = "mono"
        resampler = av.AudioResampler(sound.format.name, "mono", RATE)
        for n in range(4 * seconds):
            image = np.full((48, 64, 3), n * 199 % 256, np.uint8)
            output.mux(video.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
            if n / 4 < late_s:
                continue
            part = samples[None, n * RATE // 4 : (n + 1) * RATE // 4]
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), "s16", "mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE, n * RATE // 4, Fraction(1, RATE)
            for one in resampler.resample(frame):
                output.mux(sound.encode(one))
        for stream in (video, sound):
            output.mux(stream.encode(None))
    return path
