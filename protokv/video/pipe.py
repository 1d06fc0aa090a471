"""Bytes that come in while they are made, from a pipe or a growing file, as a file object that FFmpeg reads.

Such a file cannot seek, so an MP4 whose index comes after its pictures cannot be read: `check` tells from its first
boxes. Knows no decoder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from protokv.errors import SourceNotFound, SourceUnreadable

# Seconds between two looks at a growing file.
LOOK_S = 0.2

_HEADER = 16
_INDEX_FIRST = "remux it: `ffmpeg -i IN.mp4 -c copy -movflags frag_keyframe OUT.mp4`, or as MPEG-TS with `-f mpegts`"


class Incoming:
    """A readable file object over incoming bytes."""

    def __init__(self, read: Callable[[int], bytes], name: str, close: Callable[[], None] = lambda: None) -> None:
        self._read, self._name, self.close = read, name, close
        self._held = b""

    def read(self, n: int) -> bytes:
        """Return up to `n` bytes; none only at the end."""
        if self._held:
            given, self._held = self._held[:n], self._held[n:]
            return given
        return self._read(n)

    def check(self) -> None:
        """Refuse a file that cannot be read from front to back.

        Raises:
            SourceUnreadable: nothing came, or it is an MP4 with its index at the end.
        """
        at = 0
        while True:
            head = self._peek(at, _HEADER)
            if not at and not head:
                raise SourceUnreadable(
                    f"nothing came from {self._name}", hint="look at what the program before it says"
                )
            size, kind = int.from_bytes(head[:4], "big"), head[4:8]
            if len(head) < _HEADER or (not at and kind != b"ftyp"):
                return
            if kind == b"mdat":
                raise SourceUnreadable(
                    f"{self._name} is an MP4 whose index comes after its pictures: it cannot be read as it comes in",
                    hint=_INDEX_FIRST,
                )
            if kind not in (b"ftyp", b"free", b"skip", b"wide", b"uuid") or not 8 <= size <= 1 << 20:
                return
            at += size

    def _peek(self, at: int, n: int) -> bytes:
        while len(self._held) < at + n and (more := self._read(1 << 16)):
            self._held += more
        return self._held[at : at + n]


def from_descriptor(number: int, name: str) -> Incoming:
    """Read from an open file descriptor. SourceUnreadable if it is closed."""
    try:
        os.fstat(number)
    except OSError as error:
        raise SourceUnreadable(f"{name} is closed", hint="pipe a video into it") from error

    def read(n: int) -> bytes:
        try:
            return os.read(number, n)
        except OSError as error:
            raise EOFError from error

    return Incoming(read, name)


def growing(path: Path, patience_s: float) -> Incoming:
    """Read a file, and go on while it grows; it ends once nothing was added for `patience_s`."""
    try:
        file: BinaryIO = path.open("rb", buffering=0)
    except FileNotFoundError:
        raise SourceNotFound(f"no video at {path}", hint="check the spelling of the path") from None
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path}: {error.strerror or error}") from error

    def read(n: int) -> bytes:
        until_s = time.monotonic() + patience_s
        while not (data := file.read(n)):
            if time.monotonic() >= until_s:
                break
            time.sleep(LOOK_S)
        return data

    return Incoming(read, path.name, file.close)
