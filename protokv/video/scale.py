"""The scale of a file's clock: how many seconds a tick is, one number of the header that stretches all times alike.

A damaged stamp shows beside its neighbours; a damaged scale does not. So what else the file says is held against it,
and a scale that this contradicts is replaced. Every frame then counts as damaged.

- AVI says twice what lies between two frames, in `strh` and in `avih`. Where one is `FAR` times the other, that is
  believed which is nearer to `USUAL_S`. Where `avih` is silent, `strh` is believed up to `ALONE_S`.
- Matroska counts in powers of ten of a nanosecond. Another unit, which a muxer chooses only if it is told to, must
  agree with the duration in the stream's tags, which is no multiple of it; without one it must be no longer than the
  usual millisecond. What is not believed is a millisecond.
- MP4 says in `mvhd`, in a scale of its own, how long all is. Where its frames, evenly, last `FAR` times as long, and
  that is further from `USUAL_S`, they are fitted in.

MPEG-TS and FLV count in fixed units, fragments of MP4 say nothing twice: they are believed. Slow pictures keep their
clock where a header says the same twice. Knows no decoder and no frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import median_low
from typing import BinaryIO

# Statements that differ by less are one: rates are rounded, and tags are copied.
FAR = 2

# What lies between two frames of most videos, in seconds.
USUAL_S = Fraction(1, 25)

# The most that is believed to lie between all frames, in seconds, where nothing confirms it.
ALONE_S = 1

# Where `avih` is, it is within so many.
AVI_HEAD_BYTES = 4096

# So many gaps between frames show whether all are alike.
LOOKED_AT = 64

# `moov` is among so many boxes of a file, and `mvhd` in so many bytes at its beginning.
MOST_BOXES, MVHD_BYTES = 64, 64

# What nearly all Matroska files count in.
MILLISECOND = Fraction(1, 1000)


def of_avi(stated: Fraction, head: bytes) -> Fraction:
    """Seconds per frame: `stated` by `strh`, unless `avih` in the first bytes of the file contradicts it credibly."""
    at = head.find(b"avih") + 8
    beside = Fraction(int.from_bytes(head[at : at + 4], "little"), 1_000_000) if at >= 8 else Fraction(0)
    if not beside:
        return stated if stated <= ALONE_S else USUAL_S
    return stated if _agree(stated, beside) else min(stated, beside, key=_strangeness)


def of_matroska(stated: Fraction, whole_s: float | None, tagged_s: float | None) -> Fraction:
    """Seconds per tick.

    Args:
        stated: by `TimestampScale`.
        whole_s: the duration in such ticks; None where a live stream has none.
        tagged_s: the duration that the tags of the stream say.
    """
    if _is_power_of_ten(stated):
        return stated
    if whole_s and tagged_s:
        return stated if _agree(Fraction(whole_s), Fraction(tagged_s)) else MILLISECOND
    return min(stated, MILLISECOND)


def of_mp4(stated: Fraction, ticks: Sequence[int], whole_s: Fraction | None) -> Fraction:
    """Seconds per tick.

    Args:
        stated: by `mdhd`.
        ticks: of all packets, in order of decoding.
        whole_s: as `movie_s` found it.
    """
    if whole_s is None or len(ticks) < 2:
        return stated
    gaps = len(ticks) - 1
    some = range(0, gaps, 1 + gaps // LOOKED_AT)
    even_s = stated * median_low(ticks[i + 1] - ticks[i] for i in some) * len(ticks)
    all_s = stated * (ticks[gaps] - ticks[0]) * len(ticks) / gaps
    if min(even_s, all_s) < FAR * whole_s or _strangeness(all_s / len(ticks)) < _strangeness(whole_s / len(ticks)):
        return stated
    return stated * whole_s / all_s


def movie_s(file: BinaryIO) -> Fraction | None:
    """Seconds that `mvhd` of an MP4 file states; None where there is none, or it states none."""
    at = 0
    for _ in range(MOST_BOXES):
        file.seek(at)
        head = file.read(16 + MVHD_BYTES)
        size, name = int.from_bytes(head[:4]), head[4:8]
        if name == b"moov":
            return _movie_s(head[head.find(b"mvhd") + 4 :]) if b"mvhd" in head else None
        if size == 1:
            size = int.from_bytes(head[8:16])
        if size < 8:
            break
        at += size
    return None


def _movie_s(fields: bytes) -> Fraction | None:
    # Version 1 has 64 bits for times.
    at, width = (20, 8) if fields[:1] == b"\1" else (12, 4)
    per_s, length = int.from_bytes(fields[at : at + 4]), int.from_bytes(fields[at + 4 : at + 4 + width])
    return Fraction(length, per_s) if per_s and length else None


def _strangeness(per_frame_s: Fraction) -> float:
    return abs(math.log(per_frame_s / USUAL_S))


def _agree(a: Fraction, b: Fraction) -> bool:
    return max(a, b) < FAR * min(a, b)


def _is_power_of_ten(unit: Fraction) -> bool:
    nanoseconds = unit * 1_000_000_000
    return nanoseconds.denominator == 1 and set(str(nanoseconds.numerator)[1:]) <= {"0"} and str(nanoseconds)[0] == "1"
