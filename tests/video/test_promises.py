"""What a container promises and was not seen is damage: at the head, in the middle, at the tail, and by its clock.

Each case damages one file and reads it. It must be watched whole, or be damaged, or be refused; less is a silent loss.
Bits are flipped in and around the heads of frames, bytes are wiped and taken out, and the end is cut off. The clock is
set to 0, to 1, to its largest value and, where a second length is stated, to others. Honest files, however they were
cut and shifted, are never damaged.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import av
import pytest

from protokv.errors import SourceError
from protokv.video import open_source
from tests.video.conftest import Clip, write

DECODERS = ["auto", *(["decord"] if importlib.util.find_spec("decord") else [])]
SEEDS = int(os.environ.get("PROTOKV_TEST_LOSSES", "40"))
TICKS = [40 * i for i in range(250)]
SMALL: dict[str, Any] = {"width": 64, "height": 48}
VP8: dict[str, Any] = {"codec": "libvpx", "options": {"deadline": "realtime", "cpu-used": "8"}, **SMALL}
BASES = {
    "mp4": Clip(TICKS, options={"bf": "2"}, **SMALL),
    "parts.mp4": Clip(TICKS, mux={"movflags": "frag_keyframe+empty_moov"}, **SMALL),
    "mov": Clip(TICKS, suffix="mov", mux={"movflags": "faststart"}, audio_s=10.0, **SMALL),
    "mkv": Clip(TICKS, suffix="mkv", options={"bf": "2"}, gop=50, audio_s=10.0, **SMALL),
    "webm": Clip(TICKS, suffix="webm", gop=125, **VP8),
    "avi": Clip(list(range(250)), Fraction(1, 25), suffix="avi", codec="mpeg4", **SMALL),
    "ts": Clip(TICKS, suffix="ts", audio_s=10.0, gop=25, **SMALL),
    "flv": Clip(TICKS, suffix="flv", gop=25, **SMALL),
    "ogg": Clip(TICKS, suffix="ogg", gop=50, **VP8),
}
# Where a container counts time: the bytes before the field, how far behind them it is, its bytes and their order.
CLOCKS = {
    "mp4": [(b"mvhd", 12, 4, "big"), (b"mdhd", 12, 4, "big")],
    "mkv": [(b"\x2a\xd7\xb1\x83", 0, 3, "big")],
    "webm": [(b"\x2a\xd7\xb1\x83", 0, 3, "big")],
    "avi": [(b"strh", 24, 4, "little"), (b"strh", 28, 4, "little")],
    "ogg": [(b"OVP80", 13, 4, "big"), (b"OVP80", 17, 4, "big")],
}
CLOCKS["parts.mp4"] = CLOCKS["mov"] = CLOCKS["mp4"]
# The clocks of a fragmented file are stated once, so a wrong bit contradicts nothing.
BITS = {"mp4": (2, 4, 8, 13, 17), "mov": (2, 4, 8, 13, 17)}


def starts(path: Path) -> list[int]:
    with av.open(str(path)) as container:
        return sorted(packet.pos for packet in container.demux(video=0) if packet.size and packet.pos is not None)


def damaged(data: bytes, at: list[int], place: str, rng: random.Random) -> bytes:
    """Damage one place near the head of a frame."""
    n, new = len(at), bytearray(data)
    frame = {
        "head": rng.choice([0, 0, 0, 1, 2, rng.randrange(n // 5)]),
        "middle": rng.randrange(n // 3, 2 * n // 3),
        "tail": rng.choice([n - 1, n - 2, n - 3, rng.randrange(4 * n // 5, n)]),
    }[place]
    kind = rng.choice(["bit", "bit", "bit", "zeros", "gone", *(["cut"] if place == "tail" else [])])
    begin, run = max(0, at[frame] - rng.randrange(30)), rng.choice([200, 1000, 3000])
    if kind == "bit":
        new[min(len(new) - 1, max(0, at[frame] + rng.randrange(-24, 8)))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        new[begin : begin + run] = bytes(len(new[begin : begin + run]))
    elif kind == "gone":
        del new[begin : begin + run]
    else:
        del new[begin:]
    return bytes(new)


def outcome(path: Path, decoder: Any, true_s: list[float]) -> str:
    try:
        with open_source(path, decoder) as source:
            found_s = [frame.time_s for frame in source.frames()]
            if not source.damage.ok:
                return "damaged"
    except SourceError:
        return "refused"
    whole = len(found_s) == len(true_s) and all(abs(a - b) < 0.1 for a, b in zip(found_s, true_s, strict=True))
    return "whole" if whole else "silent"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("promises")
    for name, clip in BASES.items():
        write(replace(clip, mux={**clip.mux, "fflags": "+bitexact"}), made / f"base.{name}")
    return made


def losses(folder: Path, name: str, decoder: str, seeds: range) -> dict[str, Counter[str]]:
    base, path = folder / f"base.{name}", folder / f"case.{name}"
    data, at = base.read_bytes(), starts(base)
    with open_source(base) as source:
        true_s = [frame.time_s for frame in source.frames()]
        assert source.damage.ok
    found: dict[str, Counter[str]] = {}
    for place in ("head", "middle", "tail"):
        found[place] = Counter()
        for seed in seeds:
            path.write_bytes(damaged(data, at, place, random.Random(f"{name}{place}{seed}")))
            found[place][outcome(path, decoder, true_s)] += 1
    found["clock"] = Counter()
    for mark, behind, size, order in CLOCKS.get(name, []):
        begin = data.index(mark) + len(mark) + behind
        stated = int.from_bytes(data[begin : begin + size], order)
        for value in (0, 1, 256**size - 1, *(stated ^ 1 << bit for bit in BITS.get(name, ()))):
            path.write_bytes(data[:begin] + value.to_bytes(size, order) + data[begin + size :])
            found["clock"][outcome(path, decoder, true_s)] += 1
    return found


@pytest.mark.parametrize("name", BASES)
def test_nothing_is_lost_in_silence(name, folder):
    found = losses(folder, name, "auto", range(2))
    assert sum(counts["silent"] for counts in found.values()) == 0, found
    assert sum(counts["damaged"] for counts in found.values()) > 1, found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", BASES)
def test_the_table_of_losses_has_no_silent_one(name, decoder, folder):
    for place, counts in losses(folder, name, decoder, range(100, 100 + SEEDS)).items():
        print(f"{decoder} {name} {place}: {dict(counts)}")
        assert counts["silent"] == 0, place


@pytest.mark.parametrize("name", ["mkv", "webm"])
@pytest.mark.parametrize("bit", [0, 13, 30])
def test_a_bit_of_the_first_cluster_moves_no_time_and_is_damage_at_the_head(bit, name, folder):
    data = bytearray((folder / f"base.{name}").read_bytes())
    data[data.index(b"\x1f\x43\xb6\x75") + bit // 8] ^= 1 << bit % 8
    path = folder / f"first.{name}"
    path.write_bytes(data)
    with open_source(path) as source:
        times_s = [frame.time_s for frame in source.frames()]
        assert source.damage.lost_from_s == 0.0
        assert len(times_s) + source.damage.frames_lost == pytest.approx(250, abs=3)
        assert times_s[0] > 2.0
        assert times_s[-1] == pytest.approx(9.96, abs=0.01)


@pytest.mark.parametrize("name", ["mp4", "mov"])
def test_an_index_that_breaks_off_says_how_many_frames_are_missing(name, folder):
    data = bytearray((folder / f"base.{name}").read_bytes())
    at = data.index(b"stsz") + 16 + 4 * 200
    data[at : at + 4] = b"\x60\0\0\0"
    path = folder / f"index.{name}"
    path.write_bytes(data)
    with open_source(path) as source:
        assert len(list(source.frames())) + source.damage.frames_lost == pytest.approx(250, abs=3)
        assert source.damage.frames_lost == pytest.approx(50, abs=3)


# Honest files


@pytest.mark.parametrize("shown", [0.3, 0.7, 0.95])
def test_a_movie_that_an_edit_trims_is_whole(shown, folder):
    data = bytearray((folder / "base.mp4").read_bytes())
    for mark, behind in ((b"mvhd", 16), (b"tkhd", 20), (b"elst", 8)):
        at = data.index(mark) + len(mark) + behind
        data[at : at + 4] = round(int.from_bytes(data[at : at + 4], "big") * shown).to_bytes(4, "big")
    path = folder / "trimmed.mp4"
    path.write_bytes(data)
    with open_source(path) as source:
        assert len(list(source.frames())) == pytest.approx(250 * shown, abs=3)
        assert source.damage.ok


FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "mp4": ("mp4", {}),
    "no edit list": ("mp4", {"use_editlist": "0"}),
    "fragments": ("mp4", {"movflags": "frag_keyframe+empty_moov"}),
    "mkv": ("matroska", {}),
    "live mkv": ("matroska", {"live": "1"}),
    "mkv without sums": ("matroska", {"write_crc32": "0", "cluster_time_limit": "200"}),
    "ts": ("mpegts", {}),
    "ts with its own times": ("mpegts", {"mpegts_copyts": "1"}),
    "m2ts": ("mpegts", {"mpegts_m2ts_mode": "1"}),
    "ts of constant rate": ("mpegts", {"muxrate": "2000000"}),
    "flv": ("flv", {}),
    "flv without length": ("flv", {"flvflags": "no_duration_filesize"}),
    "avi": ("avi", {}),
    "nut": ("nut", {}),
}
# Seconds: where the copy begins, where it ends, how much later everything is, and how much later the sound is.
CUTS = {
    "whole": (0.0, 99.0, 0.0, 0.0),
    "the middle": (4.1, 8.0, -4.0, 0.0),
    "the middle at its time": (4.1, 8.0, 0.0, 0.0),
    "late": (0.0, 99.0, 70.0, 0.0),
    "sound first": (0.0, 99.0, 1.5, -1.5),
    "sound last": (0.0, 99.0, 0.0, 1.5),
}


def copy(source: Path, target: Path, form: tuple[str, dict[str, str]], cut: tuple[float, ...]) -> None:
    """Copy packets as `ffmpeg -c copy` does, from a key frame on."""
    begin_s, end_s, later_s, sound_s = cut
    with av.open(str(source)) as original, av.open(str(target), "w", format=form[0], options=form[1]) as made:
        streams = {one.index: made.add_stream_from_template(one) for one in original.streams}
        begun = False
        if begin_s:
            original.seek(int(begin_s * av.time_base))
        for packet in original.demux():
            begun |= packet.stream.type == "video" and packet.is_keyframe
            if packet.dts is None or not begun or packet.dts * packet.time_base > end_s:
                continue
            shift = round((later_s + sound_s * (packet.stream.type == "audio")) / packet.time_base)
            packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
            packet.stream = streams[packet.stream.index]
            made.mux(packet)


def alarms(folder: Path, decoder: Any, every: int) -> tuple[dict[tuple[str, str, str], str], int]:
    """Copy and read honest files; return what was said against them, and how many were read."""
    vfr = [sum([20, 100, 33, 250, 7][k % 5] for k in range(i)) for i in range(120)]
    sources = [write(Clip(TICKS, options={"bf": "3"}, gop=50, audio_s=14.0, **SMALL), folder / "sound.mp4")]
    sources += [write(Clip(vfr, options={"bf": "0"}, gop=24, **SMALL), folder / "vfr.mp4")]
    found, read = {}, 0
    for source, form, cut in list(product(sources, FORMS, CUTS))[::every]:
        path = folder / f"honest.{FORMS[form][0].replace('mpegts', 'ts')}"
        try:
            copy(source, path, FORMS[form], CUTS[cut])
        except av.error.FFmpegError:
            continue  # this container cannot hold it
        try:
            with open_source(path, decoder) as opened:
                read += sum(1 for _ in opened.frames()) > 0
                said = opened.damage.message
        except SourceError as error:
            said = "" if "decord cannot read" in error.message else error.message
        if said:
            found[source.name, form, cut] = said
    return found, read


def test_honest_files_are_not_damaged(tmp_path):
    found, read = alarms(tmp_path, "auto", 7)
    assert not found
    assert read > 15


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
def test_no_honest_file_is_damaged(decoder, tmp_path):
    found, read = alarms(tmp_path, decoder, 1)
    assert not found
    assert read > 100
