"""Count the samples that the header of an MP4 declares, before FFmpeg makes an index of them.

FFmpeg takes some 70 bytes of memory for each sample, and a header of a few bytes can declare
thousands of millions.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from protokv.errors import SourceUnreadable

# Samples are at least one byte long. A copy that was cut short may declare more than it holds.
_MORE_SAMPLES = 4_000_000

# A file of many fragments is not walked to its end; `limit_ffmpeg_blocks` bounds the rest.
_MOST_BOXES = 50_000

_MOST_HEADER_BYTES = 64 << 20

_PARENTS = {b"moov", b"cmov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"}

# Bytes between the name of a box and its count
_COUNTS = {b"stsz": 8, b"stz2": 8, b"trun": 4}


def check_declared_samples(file: BinaryIO, name: object) -> None:
    """Refuse an MP4 that declares more samples than it can hold, with some to spare.

    SourceUnreadable. Files in other formats pass.
    """
    size = file.seek(0, io.SEEK_END)
    declared = sum(_count(file, 0, size, [_MOST_BOXES]))
    if declared > size + _MORE_SAMPLES:
        raise SourceUnreadable(
            f"{name} declares {declared:,} frames or more, and holds {size:,} bytes",
            hint="its header is damaged, or made to do harm; copy it again",
        )


def _count(file: BinaryIO, at: int, end: int, left: list[int]) -> Iterator[int]:
    """Give the counts of samples in the boxes from `at` to `end`; `left` boxes at most are read."""
    while at + 8 <= end and left[0] > 0:
        left[0] -= 1
        file.seek(at)
        length, kind, long = struct.unpack(">I4sQ", file.read(16).ljust(16, b"\0"))
        body = at + 8
        if length == 1:
            length = long
            body = at + 16
        until = min(end, at + length) if length else end
        if until < body:
            return
        if kind in _PARENTS:
            yield from _count(file, body, until, left)
        elif kind in _COUNTS:
            file.seek(body + _COUNTS[kind])
            yield int.from_bytes(file.read(4), "big")
        elif kind == b"cmvd":
            # QuickTime's header under zlib, behind its length
            file.seek(body + 4)
            packed = file.read(min(until - body, _MOST_HEADER_BYTES))
            plain = zlib.decompressobj().decompress(packed, _MOST_HEADER_BYTES)
            yield from _count(io.BytesIO(plain), 0, len(plain), left)
        at = until
