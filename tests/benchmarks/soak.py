"""Run `protokv ingest --every` over a day of video: memory, file, and CPU time of a step at ten places on the way.

    python -m tests.benchmarks.soak
    python -m tests.benchmarks.soak --steps 2000

The video is the sample of a minute at two small frames a second, again and again; the embedded model watches it, a
step a second. Writes `results/soak-cpu.*`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import torch

from tests.benchmarks.results import cpu_seconds, resident_mib, write_table

SAMPLE = Path(__file__).parents[2] / "samples/minute/video.mp4"
NOTE = (
    "`protokv ingest --budget {budget} --every {every}steps`, {steps} steps of two frames. `cpu_ms` is the CPU time of "
    "a step since the row before, with decoding; `resident_mib` is what the process held at that commit."
)
FPS, SIDE = 2, 84


def write_video(path: Path, minutes: int) -> None:
    """Write the sample `minutes` times in a row, encoded once."""
    once = path.with_name("once.mp4")
    with av.open(str(SAMPLE)) as source, av.open(str(once), "w") as target:
        video = source.streams.video[0]
        stream = target.add_stream("libx264", rate=FPS, options={"crf": "23", "bf": "0"})
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        each = round(float(video.average_rate or 0)) // FPS
        for index, frame in enumerate(source.decode(video)):
            if index % each == 0:
                frame = frame.reformat(width=SIDE, height=SIDE)
                frame.pts, frame.time_base = index // each, 1 / stream.codec_context.framerate
                frame.pict_type = av.video.frame.PictureType.NONE
                target.mux(stream.encode(frame))
        target.mux(stream.encode(None))
    with av.open(str(once)) as source, av.open(str(path), "w") as target:
        video = source.streams.video[0]
        stream = target.add_stream_from_template(video)
        packets = [(bytes(packet), packet.pts, packet.is_keyframe) for packet in source.demux(video) if packet.size]
        span = round(60 / video.time_base)
        for minute in range(minutes):
            for data, pts, is_keyframe in packets:
                packet = av.Packet(data)
                packet.stream, packet.time_base, packet.is_keyframe = stream, video.time_base, is_keyframe
                packet.pts = packet.dts = pts + minute * span
                target.mux(packet)


def watch(video: Path, state: Path, *, budget: int, every: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each commit.

    Raises:
        subprocess.CalledProcessError: the command did not end with 0.
    """
    command = [sys.executable, "-m", "protokv", "ingest", str(video), "-o", str(state), "--format", "json"]
    command += ["--budget", str(budget), "--every", f"{every}steps"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        before = (0, 0.0)
        for line in process.stdout:
            event = json.loads(line)
            # The last commit is reported once more at the end.
            if event["type"] != "commit" or event["steps"] == before[0]:
                continue
            steps, seconds = event["steps"], cpu_seconds(process.pid)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=1000, help="steps from commit to commit")
    parser.add_argument("--budget", type=int, default=256)
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder, "day.mp4")
        write_video(video, -(-given["steps"] // 60))
        rows = []
        for row in watch(video, Path(folder, "day.safetensors"), budget=given["budget"], every=given["every"]):
            print(row, flush=True)
            rows.append(row)
    tenth = max(2, len(rows) // 10)
    write_table("soak", "cpu", [rows[0], *rows[tenth - 1 :: tenth]], NOTE.format(**given))


if __name__ == "__main__":
    main()
