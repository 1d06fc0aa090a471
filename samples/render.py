"""Write a procedural stream as a real video file.

In the root of a checkout: `python -m samples.render --seed 7 --seconds 60 -o video.mp4`.

H.264 (libx264), yuv420p, 8 frames per second, 336 x 336. Frames are drawn one at a time, so length
costs no memory. Needs PyAV, but no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from protokv.errors import ProtoKVError
from samples.questions import make_questions
from samples.worlds.world import World, WorldConfig

VIDEO_FPS: Final = 8
VIDEO_SIDE: Final = 336


def render(
    world: World, path: Path, *, fps: int = VIDEO_FPS, side: int = VIDEO_SIDE, crf: int = 23
) -> int:
    """Write the whole stream to `path` (its suffix chooses the container) and return the number of
    frames.

    Frame i has the time stamp i / fps seconds. The same world gives the same pictures, but the
    bytes of the file depend on the version of the encoder.
    """
    import av

    n_frames = world.config.length_s * fps
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx264", rate=fps, options={"crf": str(crf), "preset": "slow", "threads": "1"}
        )
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for i in range(n_frames):
            frame = av.VideoFrame.from_ndarray(world.frame(i / fps, side), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return n_frames


def main(arguments: Sequence[str] | None = None) -> int:
    """Render one video, and write its questions with --questions."""
    parser = argparse.ArgumentParser(
        prog="python -m samples.render",
        description="Render a procedural video whose events are known.",
        epilog=(
            "Ten minutes, evidence in the first: --seconds 600 --evidence 4 --evidence-seconds 60 "
            "--rate 6"
        ),
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="video file to write, such as video.mp4"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument(
        "--rate", type=float, default=10.0, help="events per minute (after the evidence, if any)"
    )
    parser.add_argument("--moving", type=float, default=0.3, help="share of shapes that move")
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.25,
        help="share that may still be visible when the next begins",
    )
    parser.add_argument(
        "--cuts",
        type=int,
        nargs=2,
        default=(6, 20),
        metavar=("MIN", "MAX"),
        help="seconds of a scene",
    )
    parser.add_argument("--no-cuts", action="store_true", help="one background for the whole video")
    parser.add_argument(
        "--evidence",
        type=int,
        default=0,
        help="1 to 4 events that come first and share nothing with others",
    )
    parser.add_argument("--evidence-seconds", type=int, default=60)
    parser.add_argument("--side", type=int, default=VIDEO_SIDE, help="pixels per side, even")
    parser.add_argument(
        "--questions", type=Path, help="also write questions asked at the end, as JSON lines"
    )
    parser.add_argument("--per-type", type=int, default=2, help="questions of each type at most")
    options = parser.parse_args(arguments)
    try:
        config = WorldConfig(
            seed=options.seed,
            length_s=options.seconds,
            events_per_minute=options.rate,
            moving=options.moving,
            overlap=options.overlap,
            cut_s=None if options.no_cuts else (options.cuts[0], options.cuts[1]),
            evidence_events=options.evidence,
            evidence_s=options.evidence_seconds,
        )
    except ProtoKVError as error:
        parser.error(error.message)
    world = World(config)
    n_frames = render(world, options.output, side=options.side)
    if options.questions:
        asked = make_questions(world, float(config.length_s), per_type=options.per_type)
        lines = [json.dumps(asdict(question)) for question in asked]
        options.questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    n_events = len(world.events_until(config.length_s))
    size_kib = options.output.stat().st_size / 1024
    print(
        f"{options.output}: {n_frames} frames, {n_events} events, {size_kib:.0f} KiB",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
