"""Damaged videos give frames and an account of the damage or a SourceError, in bounded memory, and
can be resumed.

`python -m tests.video.test_fuzz FOLDER FIRST LAST` reads cases and prints a line of JSON for each.
All cases of a call are read in one process, whose memory is limited: a decoder that dies or grows
ends that process and not the tests.
"""

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from protokv.errors import SourceError
from protokv.texts import Keywords
from protokv.video import open_source, read_steps
from tests.conftest import slow, wide
from tests.peak import peak_kib
from tests.video.conftest import Clip, write

pytest.importorskip("resource")

# Three seconds in every container; damage must not turn them into more than an hour of repeated
# frames.
STEADY = [40 * i for i in range(75)]
MOST_S = 3600.0
X265 = {"x265-params": "keyint=12:log-level=none:pools=none:frame-threads=1"}
VPX: Keywords = {"options": {"deadline": "realtime"}}
CLIPS = {
    "mp4": Clip(STEADY, options={"bf": "2"}),
    "front.mp4": Clip(STEADY, mux={"movflags": "faststart"}),
    "parts.mp4": Clip(STEADY, mux={"movflags": "frag_keyframe+empty_moov"}),
    "mkv": Clip([70_000 + t for t in STEADY], suffix="mkv", mux={"cluster_time_limit": "500"}),
    "hevc.mkv": Clip(STEADY, suffix="mkv", codec="libx265", options=X265),
    "vp8.webm": Clip(STEADY, suffix="webm", codec="libvpx", **VPX),
    "vp9.webm": Clip(STEADY, suffix="webm", codec="libvpx-vp9", **VPX),
    "ts": Clip(STEADY, suffix="ts", audio_s=3.0),
    "avi": Clip(list(range(75)), Fraction(1, 25), suffix="avi", codec="mpeg4", options={"bf": "2"}),
    "flv": Clip(STEADY, suffix="flv"),
    "ogg": Clip(STEADY, suffix="ogg", codec="libvpx", **VPX),
    "still.mkv": Clip(STEADY, suffix="mkv", codec="mjpeg", pixels="yuvj420p"),
}
DAMAGE = ["flip", "flips", "header", "tail", "cut", "zeros", "drop", "repeat", "splice", "ones"]


def mutate(data: bytes, kind: str, rng: random.Random) -> bytes:
    size = len(data)
    at = rng.randrange(size)
    run = rng.randint(1, 1 + size // 8)
    if kind in ("flip", "flips", "header", "tail"):
        new = bytearray(data)
        low, high = {"header": (0, min(900, size)), "tail": (max(0, size - 1500), size)}.get(
            kind, (0, size)
        )
        for _ in range(
            rng.randint(1, 60) if kind == "flips" else rng.randint(1, 4) if kind != "flip" else 1
        ):
            new[rng.randrange(low, high)] ^= (
                1 << rng.randrange(8) if rng.random() < 0.5 else rng.randint(1, 255)
            )
        return bytes(new)
    other = rng.randrange(size)
    middle = {
        "cut": b"",
        "drop": b"",
        "zeros": bytes(len(data[at : at + run])),
        "ones": b"\xff" * len(data[at : at + run]),
        "repeat": 2 * data[at : at + run],
        "splice": data[other : other + run],
    }[kind]
    return data[:at] + middle + (b"" if kind == "cut" else data[at + run :])


def outcome(path: Path) -> str:
    """Read a file; return "read", "damaged" or "refused". Everything else is an error."""
    try:
        with open_source(path) as source:
            # A picture is made when it is asked for.
            times = [f.time_s for f in source.frames() if f.image.size]
            assert all(a < b for a, b in pairwise(times)), "times do not increase"
            damage = source.damage
            assert damage.ok or (damage.message and damage.lost_from_s is not None)
            assert max(times, default=0.0) <= MOST_S
            steps = list(read_steps(source, 2.0, 2))
            # A reading that resumes, from the beginning if damage was met before, gives the same
            # steps.
            for first in {len(steps) // 2, max(0, len(steps) - 1)} - {0}:
                before = steps[first - 1]
                rest = read_steps(
                    source, 2.0, 2, first, from_beginning=not before.damage.ok, mark=before.mark
                )
                assert [s.images.tobytes() for s in rest] == [
                    s.images.tobytes() for s in steps[first:]
                ], "resumed"
            return "read" if damage.ok else "damaged"
    except SourceError as error:
        return (
            "refused"
            if error.message and "\n" not in error.message
            else f"wrong message: {error.message}"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fuzz")
    for name, clip in CLIPS.items():
        # Write the same bytes in every run: Matroska draws a random number otherwise.
        write(
            replace(clip, width=64, height=48, mux={**clip.mux, "fflags": "+bitexact"}),
            made / f"whole.{name}",
        )
    return made


# Case 2895 shows old memory of the decoder, which depends on the frames that a reading holds.
@pytest.mark.parametrize(
    ("first", "last"),
    [(2890, 2900), *wide((2870, 2910)), *slow((1000, 3000))],
)
@pytest.mark.timeout(3600)
def test_damaged_videos_give_clean_reports_or_source_errors_and_can_be_resumed(
    first: int, last: int, folder: Path
) -> None:
    assert {name: outcome(folder / f"whole.{name}") for name in CLIPS} == dict.fromkeys(
        CLIPS, "read"
    )
    command = [sys.executable, "-m", "tests.video.test_fuzz", str(folder), str(first), str(last)]
    out = subprocess.run(
        command, capture_output=True, text=True, timeout=60 + last - first, check=False
    )
    found = [json.loads(line) for line in out.stdout.splitlines()]
    assert [one["case"] for one in found] == list(range(first, last)), out.stderr
    assert [one for one in found if one["outcome"].startswith("wrong")] == []
    assert max(one["peak_mib"] for one in found) < 1024
    counts = Counter(one["outcome"] for one in found)
    assert min(counts["read"], counts["damaged"], counts["refused"]) > 2


def main(folder: Path, first: int, last: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(first, last):
        rng = random.Random(number)
        name = rng.choice(sorted(CLIPS))
        kind = rng.choice(DAMAGE)
        path = folder / f"{kind}.{name}"
        path.write_bytes(mutate((folder / f"whole.{name}").read_bytes(), kind, rng))
        try:
            found = outcome(path)
        except Exception as error:
            found = f"wrong: {path.name}: {type(error).__name__}: {error}"
        print(
            json.dumps({"case": number, "outcome": found, "peak_mib": peak_kib() >> 10}), flush=True
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
