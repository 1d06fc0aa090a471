"""Run `protokv ingest --every` over a day of video: memory, file, and CPU time of a step at ten
places on the way.

    python -m tests.benchmarks.soak
    python -m tests.benchmarks.soak --steps 2000

The video is the sample of a minute at two small frames a second, again and again; the embedded
model watches it, a step a second. Writes `results/soak-cpu.*`."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain, islice, repeat
from pathlib import Path

import av
import torch

from protokv.texts import JsonObject
from tests.benchmarks.results import cpu_seconds, resident_mib, write_table
from tests.video.conftest import encode

SAMPLE = Path(__file__).parents[2] / "samples/minute/video.mp4"
NOTE = (
    "`protokv ingest --budget {budget} --every {every}steps`, {steps} steps of two frames. "
    "`cpu_ms` is the CPU time of "
    "a step since the row before, with decoding; `resident_mib` is what the process held at that "
    "commit."
)
FPS = 2
SIDE = 84


def write_video(path: Path, minutes: int) -> None:
    """Write the sample `minutes` times in a row."""
    with av.open(str(SAMPLE)) as source:
        every = round(float(source.streams.video[0].average_rate or 0)) // FPS
        frames = [
            frame.reformat(SIDE, SIDE) for frame in islice(source.decode(video=0), 0, None, every)
        ]
        pictures = [frame.to_ndarray(format="rgb24") for frame in frames]
    encode(
        path, (SIDE, SIDE), chain.from_iterable(repeat(pictures, minutes)), FPS, crf="23", bf="0"
    )


def watch(video: Path, state: Path, *, budget: int, every: int) -> Iterator[JsonObject]:
    """Yield a row for each commit.

    Raises:
        subprocess.CalledProcessError: the command did not end with 0.
    """
    command = [
        sys.executable,
        "-m",
        "protokv",
        "ingest",
        str(video),
        "-o",
        str(state),
        "--format",
        "json",
        "--budget",
        str(budget),
        "--every",
        f"{every}steps",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        before = (0, 0.0)
        for line in process.stdout:
            event = json.loads(line)
            # The last commit is reported once more at the end.
            if event["type"] != "commit" or event["steps"] == before[0]:
                continue
            steps = event["steps"]
            seconds = cpu_seconds(process.pid)
            yield {
                "steps": steps,
                "cpu_ms": round(1000 * (seconds - before[1]) / (steps - before[0]), 2),
                "resident_mib": resident_mib(process.pid),
                "file_bytes": event["file_bytes"],
            }
            before = steps, seconds
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=1000, help="steps from commit to commit")
    parser.add_argument("--budget", type=int, default=256)
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder, "day.mp4")
        write_video(video, -(-given["steps"] // 60))
        rows = []
        for row in watch(
            video, Path(folder, "day.safetensors"), budget=given["budget"], every=given["every"]
        ):
            print(row, flush=True)
            rows.append(row)
    tenth = max(2, len(rows) // 10)
    write_table("soak", "cpu", [rows[0], *rows[tenth - 1 :: tenth]], NOTE.format(**given))


if __name__ == "__main__":
    main()
