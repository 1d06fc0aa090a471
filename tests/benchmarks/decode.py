"""Measure the CPU time of reading a video at two samples a second, by PyAV and by decord.

`python -m tests.benchmarks.decode` reads 40 s of 720p and writes `results/decode-cpu.*`. CPU seconds of this
process and of its children count; a busy machine disturbs them less than the clock.
"""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np

from protokv.video import Source, open_source, read_steps
from tests.benchmarks.results import write_table

WAYS: dict[str, Callable[[Path], Source]] = {
    "pyav": open_source,
}
if importlib.util.find_spec("decord"):
    WAYS["decord"] = lambda path: open_source(path, "decord")

NOTE = (
    "H.264, 1280 x 720, 30 frames per second, 40 s, a key frame every two or eight seconds; sampled at 2 frames per "
    "second. `cpu_s`: median of three, user and system, of all processes; `runs` are the three."
)


def write_video(path: Path, frames: int, width: int, height: int, gop: int) -> Path:
    """Write a textured background that moves, and a bar."""
    texture = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    background = texture.repeat(8, 0).repeat(8, 1)
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream("libx264", rate=30, options={"preset": "veryfast", "crf": "26"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = gop
        for i in range(frames):
            image = np.roll(background, i * 2, 1).copy()
            image[i * 3 % height :][: height // 8] = i * 7 % 256
            output.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        output.mux(stream.encode(None))
    return path


def cpu_s() -> float:
    """Return CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def read(path: Path, way: str) -> tuple[float, list[bytes]]:
    before = cpu_s()
    with WAYS[way](path) as source:
        images = [step.images.tobytes() for step in read_steps(source, 2.0, 2)]
    return cpu_s() - before, images


def measure(
    folder: Path, *, frames: int, width: int, height: int, gops: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each way of reading and each distance of key frames.

    Raises:
        AssertionError: two ways give different pictures.
    """
    rows = []
    for gop in gops:
        path = write_video(folder / f"{gop}.mp4", frames, width, height, gop)
        runs: dict[str, list[float]] = {way: [] for way in WAYS}
        images = None
        for _ in range(rounds):
            for way, seconds in runs.items():
                spent, seen = read(path, way)
                seconds.append(spent)
                assert images is None or seen == images, way
                images = seen
        rows += [
            {"way": way, "gop": gop, "cpu_s": round(median(runs), 2), "runs": " ".join(f"{one:.2f}" for one in runs)}
            for way, runs in runs.items()
        ]
    return rows


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        write_table(
            "decode", "cpu", measure(Path(name), frames=1200, width=1280, height=720, gops=(60, 250), rounds=3), NOTE
        )
