"""Hold what the headers of an MP4 say about its length against each other and against its index.

The header or the edit list of a track states a length in ticks of the movie's clock, and the header of its media states
one in ticks of the media's own clock. Whoever trims a movie makes the first one shorter. One wrong bit of a clock makes
them differ too, and only that bit makes them agree again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from protokv.video.structure import File

ENTERED = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts"}
READ = {b"mvhd", b"tkhd", b"mdhd", b"elst", b"stts"}

# Two honest lengths of the pictures, and of other tracks, differ by at most this.
HONEST_FRAMES, HONEST_PART = 1.5, 0.02

# Frames that a codec can hold back.
MOST_REORDERED = 32

# Nearly all clocks have a multiple of this many ticks a second, and none of those is one bit away from another.
ROUND = 100


@dataclass
class Track:
    """What a movie says about a track: clocks in ticks a second, and lengths in ticks of the clock named like them."""

    movie_clock: int
    number: int = 0
    movie: int = 0
    media_clock: int = 0
    media: int = 0
    frame: int = 0  # the first one's, of the media
    begin: int = 0  # how much of the media an edit leaves out before what it shows
    edits: int = 0

    @property
    def off(self) -> float:
        """By which part of the media the two lengths differ by more than a tick of each; 0 if one is not stated."""
        if self.edits > 1 or not self.movie or not self.media:
            return 0.0
        # What is left out at the beginning is a part of the media, or a delay of its frames.
        delays = range(self.media, self.media - self.begin, -self.frame)[:MOST_REORDERED] if self.frame else ()
        due = [ticks * self.movie_clock for ticks in (self.media, self.media - self.begin, *delays)]
        off = min(abs(self.movie * self.media_clock - one) for one in due) - self.movie_clock - self.media_clock
        return float(max(0, off) / max(1, due[0]))


def header_fault(path: Path, number: int, frames: int, indexed: int) -> str:
    """Return what is wrong with the clocks or the index of an MP4, or nothing.

    Args:
        path: the file.
        number: of the track of the pictures.
        frames: that the track states.
        indexed: how many of them FFmpeg's index holds.
    """
    with closing(File(path)) as file:
        tracks = {one.number: one for one in [*_tracks(file)]}
    pictures = tracks.pop(number, None)
    if pictures is None or pictures.edits > 1:
        return ""
    if not pictures.media_clock or not pictures.movie_clock:
        return "a clock of the file is missing"
    if pictures.off <= HONEST_FRAMES / frames:
        shown = frames * (1 - pictures.begin / pictures.media) if pictures.media else 0.0
        return "its index breaks off" if shown - indexed > HONEST_FRAMES else ""
    for name in ("media_clock", "movie_clock"):
        stated = getattr(pictures, name)
        for clock in (stated ^ 1 << bit for bit in range(32) if stated % ROUND):
            own = name == "media_clock"
            others = [one if own else replace(one, movie_clock=clock) for one in tracks.values()]
            if not replace(pictures, **{name: clock}).off and all(one.off <= HONEST_PART for one in others):
                return "its header states two lengths, which one bit of a clock lets differ"
    return ""


def _tracks(file: File) -> Iterator[Track]:
    """Give the tracks of a movie; each is whole when the next one comes."""
    track = Track(0)
    for kind, body in _boxes(file, 0, file.size):
        wide = 8 if body[:1] == b"\1" else 4  # bytes of a time

        def number(at: int, width: int, body: bytes = body) -> int:
            return int.from_bytes(body[at : at + width], "big")

        match kind:
            case b"trak":
                track = Track(track.movie_clock)
                yield track
            case b"mvhd":
                track.movie_clock = number(4 + 2 * wide, 4)
            case b"tkhd":
                track.number, track.movie = number(4 + 2 * wide, 4), number(12 + 2 * wide, wide)
            case b"mdhd":
                track.media_clock, track.media = number(4 + 2 * wide, 4), number(8 + 2 * wide, wide)
            case b"stts":
                track.frame = number(12, 4)
            case b"elst":
                for at in range(8, len(body), 2 * wide + 4):
                    if number(at + wide, wide) >> (8 * wide - 1) == 0:  # less than 0: nothing is shown
                        track.movie, track.begin = number(at, wide), number(at + wide, wide)
                        track.edits += 1


def _boxes(file: File, at: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """Give kind and content of the boxes that hold a length, and of those around them."""
    while at + 8 <= end:
        head = file.read(at, 16)
        size, kind, body = int.from_bytes(head[:4], "big"), head[4:8], at + 8
        if size == 1:
            size, body = int.from_bytes(head[8:16], "big"), at + 16
        if size < body - at:
            return
        if kind in READ:
            yield kind, file.read(body, min(size, 4096) - (body - at))
        elif kind in ENTERED:
            yield kind, b""
            yield from _boxes(file, body, min(end, at + size))
        at += size
