"""Damaged videos are watched whole, or give a clean report or a SourceError, in bounded memory, and can be resumed.

`python -m tests.video.test_fuzz FOLDER FIRST LAST DECODER` reads cases and prints the outcome of each as a line of
JSON. Its memory is limited: a decoder that dies or grows ends that process and not the tests.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import SourceError
from protokv.video import open_source, read_steps
from tests.peak import peak_kib
from tests.video.conftest import Clip, write

pytest.importorskip("resource")

# Three seconds in every container; damage must not turn them into more than an hour of repeated frames.
STEADY, MOST_S = [40 * i for i in range(75)], 3600.0
X265 = {"x265-params": "keyint=12:log-level=none:pools=none:frame-threads=1"}
SMALL: dict[str, Any] = {"width": 64, "height": 48}
BASES = {
    "mp4": Clip(STEADY, options={"bf": "2"}, **SMALL),
    "front.mp4": Clip(STEADY, mux={"movflags": "faststart"}, **SMALL),
    "parts.mp4": Clip(STEADY, mux={"movflags": "frag_keyframe+empty_moov"}, **SMALL),
    "mkv": Clip([70_000 + t for t in STEADY], suffix="mkv", mux={"cluster_time_limit": "500"}, **SMALL),
    "hevc.mkv": Clip(STEADY, suffix="mkv", codec="libx265", options=X265, **SMALL),
    "vp8.webm": Clip(STEADY, suffix="webm", codec="libvpx", options={"deadline": "realtime"}, **SMALL),
    "vp9.webm": Clip(STEADY, suffix="webm", codec="libvpx-vp9", options={"deadline": "realtime"}, **SMALL),
    "ts": Clip(STEADY, suffix="ts", audio_s=3.0, **SMALL),
    "avi": Clip(list(range(75)), Fraction(1, 25), suffix="avi", codec="mpeg4", options={"bf": "2"}, **SMALL),
    "flv": Clip(STEADY, suffix="flv", **SMALL),
    "ogg": Clip(STEADY, suffix="ogg", codec="libvpx", options={"deadline": "realtime"}, **SMALL),
    "still.mkv": Clip(STEADY, suffix="mkv", codec="mjpeg", pixels="yuvj420p", **SMALL),
}
DAMAGE = ["flip", "flips", "header", "tail", "cut", "zeros", "drop", "repeat", "splice", "ones"]


def mutate(data: bytes, kind: str, rng: random.Random) -> bytes:
    size = len(data)
    at, run = rng.randrange(size), rng.randint(1, 1 + size // 8)
    new = bytearray(data)
    if kind in ("flip", "flips", "header", "tail"):
        low, high = {"header": (0, min(900, size)), "tail": (max(0, size - 1500), size)}.get(kind, (0, size))
        for _ in range(rng.randint(1, 60) if kind == "flips" else rng.randint(1, 4) if kind != "flip" else 1):
            new[rng.randrange(low, high)] ^= 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randint(1, 255)
    elif kind == "cut":
        del new[at:]
    elif kind in ("zeros", "ones"):
        new[at : at + run] = (b"\0" if kind == "zeros" else b"\xff") * len(new[at : at + run])
    elif kind == "drop":
        del new[at : at + run]
    elif kind == "repeat":
        new[at:at] = data[at : at + run]
    else:
        other = rng.randrange(size)
        new[at : at + run] = data[other : other + run]
    return bytes(new)


def outcome(path: Path, decoder: Any = "auto") -> str:
    """Read a file; return "read", "damaged" or "refused". Everything else is an error."""
    try:
        with open_source(path, decoder) as source:
            frames = [(f.time_s, hashlib.sha256(f.image).digest()) for f in source.frames()]
            assert all(a < b for (a, _), (b, _) in pairwise(frames)), "times do not increase"
            damage = source.damage
            assert damage.ok or (damage.message and damage.lost_from_s is not None)
            assert not frames or frames[-1][0] <= MOST_S, f"{frames[-1][0]} s"
            steps = list(read_steps(source, 2.0, 2))
            # A reading that resumes, from the beginning if damage was met before, gives the same steps.
            for first in {len(steps) // 2, max(0, len(steps) - 1)} - {0}:
                before = steps[first - 1]
                met = not before.damage.ok
                rest = list(read_steps(source, 2.0, 2, first, from_beginning=met, mark=before.mark))
                assert [s.images.tobytes() for s in rest] == [s.images.tobytes() for s in steps[first:]], "resumed"
            return "read" if damage.ok else "damaged"
    except SourceError as error:
        return "refused" if error.message and "\n" not in error.message else f"wrong message: {error.message}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("fuzz")
    for name, clip in BASES.items():
        # Write the same bytes in every run: Matroska draws a random number otherwise.
        write(replace(clip, mux={**clip.mux, "fflags": "+bitexact"}), made / f"base.{name}")
    return made


def check(folder: Path, first: int, last: int) -> Counter[str]:
    command = [sys.executable, "-m", "tests.video.test_fuzz", str(folder), str(first), str(last)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60 + last - first, check=False)
    found = [json.loads(line) for line in out.stdout.splitlines()]
    assert [one["case"] for one in found] == list(range(first, last)), out.stderr
    assert [one for one in found if one["outcome"].startswith("wrong")] == []
    assert max(one["peak_mib"] for one in found) < 1024
    return Counter(one["outcome"] for one in found)


def test_the_files_are_sound_before_they_are_damaged(folder):
    assert {name: outcome(folder / f"base.{name}") for name in BASES} == dict.fromkeys(BASES, "read")


def test_a_damaged_video_gives_a_clean_report_or_a_source_error_and_can_be_resumed(folder):
    counts = check(folder, 0, 40)
    assert min(counts["read"], counts["damaged"], counts["refused"]) > 2


def test_a_jpeg_without_pixels_is_no_frame(folder):
    assert outcome(write_case(folder, 64026, "auto")) == "damaged"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_two_thousand_damaged_videos_give_clean_reports_or_source_errors(part, folder):
    check(folder, 1000 + 200 * part, 1200 + 200 * part)


def write_case(folder: Path, number: int, decoder: str) -> Path:
    rng = random.Random(number)
    name, kind = rng.choice(sorted(BASES)), rng.choice(DAMAGE)
    path = folder / f"{kind}.{decoder}.{name}"
    path.write_bytes(mutate((folder / f"base.{name}").read_bytes(), kind, rng))
    return path


def main(folder: Path, first: int, last: int, decoder: str = "auto") -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(first, last):
        path = write_case(folder, number, decoder)
        try:
            found = outcome(path, decoder)
        except Exception as error:
            found = f"wrong: {path.name}: {type(error).__name__}: {error}"
        print(json.dumps({"case": number, "outcome": found, "peak_mib": peak_kib() >> 10}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
