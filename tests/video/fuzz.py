"""Damages videos in every seeded way, reads each, and says in one line of JSON what came of it.

Run as a program with limited memory, so that a decoder that dies or grows ends this process and not the tests:
`python -m tests.video.fuzz FOLDER FIRST LAST`. Whoever starts it goes on behind the case that ended it.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from protokv.errors import SourceError
from protokv.video import open_source, read_steps
from tests.peak import peak_kib
from tests.video.conftest import Clip, write

STEADY = [40 * i for i in range(75)]
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
    "still.mkv": Clip(STEADY, suffix="mkv", codec="mjpeg", pixels="yuvj420p", **SMALL),
}

# What is above this is hours of repeated frames made of three seconds.
MOST_S = 3600.0


def make(folder: Path) -> None:
    """The sound files, `base.<name>`."""
    for name, clip in BASES.items():
        # The same bytes in every run: Matroska would draw a number of its own.
        clip = replace(clip, mux={**clip.mux, "fflags": "+bitexact"})
        write(clip, folder / f"base.{name}")


def mutate(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One damage: its name, and the bytes."""
    kind = rng.choice(["flip", "flips", "header", "tail", "cut", "zeros", "drop", "repeat", "splice", "ones"])
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
    return kind, bytes(new)


def case(folder: Path, number: int) -> tuple[Path, str]:
    """The file of a case, written; and what was done to it."""
    rng = random.Random(number)
    name = rng.choice(sorted(BASES))
    kind, data = mutate((folder / f"base.{name}").read_bytes(), rng)
    path = folder / f"case.{name}"
    path.write_bytes(data)
    return path, f"{name} {kind}"


def reading(path: Path, open_it: Callable[[Path], Any]) -> dict[str, Any]:
    """What came of one file: a clean report or a SourceError. Anything else is an AssertionError or escapes."""
    try:
        with open_it(path) as source:
            frames = [(f.time_s, hashlib.sha256(f.image).digest()) for f in source.frames()]
            assert all(a < b for (a, _), (b, _) in pairwise(frames)), "times do not increase"
            damage = source.damage
            steps = list(read_steps(source, 2.0, 2))
            # Resumed in the middle, from the beginning if damage was met before, it goes on with the same steps.
            for first in {len(steps) // 2, max(0, len(steps) - 1)} - {0}:
                before = steps[first - 1]
                met = not before.damage.ok
                rest = list(read_steps(source, 2.0, 2, first, from_beginning=met, mark=before.mark))
                assert [s.images.tobytes() for s in rest] == [s.images.tobytes() for s in steps[first:]], "resumed"
            length_s = steps[-1].time_s if steps else 0.0
            assert length_s <= MOST_S, f"{length_s} s"
            if not damage.ok:
                assert damage.message
                assert damage.lost_from_s is not None
            return {"outcome": "damaged" if not damage.ok else "read", "frames": len(frames), "length_s": length_s}
    except SourceError as error:
        return {"outcome": "refused" if error.message and "\n" not in error.message else "wrong"}


def main() -> None:
    """Cases FIRST to LAST of FOLDER."""
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(first, last):
        path, what = case(folder, number)
        began = time.monotonic()
        try:
            found = reading(path, open_source)
        except Exception as error:
            found = {"outcome": "wrong", "why": f"{type(error).__name__}: {error}"}
        peak = peak_kib() >> 10
        spent = round(time.monotonic() - began, 3)
        print(json.dumps({"case": number, "what": what, **found, "peak_mib": peak, "wall_s": spent}), flush=True)


if __name__ == "__main__":
    main()
