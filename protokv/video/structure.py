"""Walk the structure of a file beside its demultiplexer, and name the places where it is broken.

FFmpeg passes over bytes that it can make nothing of, often without a word, and goes on where it can: whole seconds are
gone. A container is a chain of elements (`CHAINS`): clusters and blocks, boxes, chunks, tags, pages, packets. `walk`
follows the chain by the elements' heads, from the first byte to the last, and compares checksums where a file has them.
It decodes nothing and knows no times. What the index of a file promises is the concern of `protokv.video.probe`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Bytes that are read at once, and the longest element whose checksum is compared.
WINDOW, MOST_SUMMED = 1 << 20, 64 << 20


# The two frame rates that the header of an AVI states may differ by this much. A frame that is shorter than this many
# microseconds is a tick of a clock.
MOST_RATIO, LEAST_FRAME_US = 2.1, 4000


class Broken(Exception):
    """The chain is broken; the message says how. `go_on` is where it goes on, if that is known."""

    def __init__(self, why: str, at: int | None = None, go_on: int | None = None) -> None:
        super().__init__(why)
        self.at, self.go_on = at, go_on


class Place(NamedTuple):
    """How far the walk came, and how the file is broken there; empty if it is whole up to here."""

    at: int
    why: str = ""
    frames: int = 0  # that began up to here; 0 where it is not known


NO_ELEMENT, CUT, WRONG_SUM = "bytes that belong to nothing", "the file is cut short", "a checksum is wrong"


class File:
    """Bytes of a file at any place, read in windows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self.size = path.stat().st_size
        self._begin, self._held = 0, b""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, at: int, n: int) -> bytes:
        """Return `n` bytes, or fewer at the end."""
        if at < self._begin or at + n > self._begin + len(self._held):
            self._file.seek(at)
            self._begin, self._held = at, self._file.read(max(n, WINDOW)) or b""
        return self._held[at - self._begin : at - self._begin + n]

    def find(self, pattern: re.Pattern[bytes], at: int) -> int:
        """Return where a pattern of at most 16 bytes comes next; the end of the file if nowhere."""
        while at < self.size:
            if found := pattern.search(self.read(at, WINDOW)):
                return at + found.start()
            at += WINDOW - 16
        return self.size


TRACKS, SIMPLE_BLOCK, NUMBERS = b"\x16\x54\xae\x6b", b"\xa3", (b"\xe7", b"\xa7", b"\xab")


class Ebml:
    """Matroska and WebM: the segment, its children, and the children of clusters."""

    frames = 0
    begins = re.compile(rb"\x1f\x43\xb6\x75")
    entered = (b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75")
    summed = (b"\x1f\x43\xb6\x75", b"\x15\x49\xa9\x66", b"\x16\x54\xae\x6b")  # cluster, info, tracks
    # fmt: off
    known = frozenset(map(bytes.fromhex, (
        "1a45dfa3", "18538067", "114d9b74", "1549a966", "1654ae6b", "1043a770", "1f43b675", "1c53bb6b", "1941a469",
        "1254c367", "ec", "bf", "e7", "5854", "a7", "ab", "a3", "a0", "af",
    )))
    # fmt: on

    def __init__(self, file: File, stream_id: int) -> None:
        self._file, self._cluster_end = file, 0
        self._tracks: set[int] = set()
        self._pictures: set[int] = set()
        self.end = 0  # that the segment states

    def step(self, at: int) -> int:
        """Return where the element at `at` ends, or its first child begins."""
        if self.end and at >= self.end:
            return self._file.size  # what stands behind the segment is no part of it
        head = self._file.read(at, 12)
        width = 9 - head[0].bit_length()
        kind = head[:width]
        if kind not in self.known or len(head) <= width or not head[width]:
            raise Broken(NO_ELEMENT)
        length_width = 9 - head[width].bit_length()
        length = int.from_bytes(head[width : width + length_width], "big") & (1 << 7 * length_width) - 1
        body = at + width + length_width
        unknown = length == (1 << 7 * length_width) - 1
        if kind == self.entered[0] and not unknown:
            self.end = body + length
        if kind == self.entered[1]:
            self._cluster_end = 0 if unknown else body + length
        if kind in self.entered and (unknown or kind == self.entered[0]):
            return body
        end = body + length
        if end > self._file.size:
            raise Broken(CUT, go_on=body if kind in self.entered else self._file.size)
        if len(kind) < 3 and self._cluster_end and at < self._cluster_end < end:
            raise Broken(NO_ELEMENT)
        if kind == TRACKS:
            # TrackNumber, then TrackType, with values of one byte; a number that is none does no harm.
            tracks = self._file.read(body, length).split(b"\xd7\x81")
            self._tracks = {one[0] for one in tracks[1:] if one}
            if b"\x83\x81" not in tracks[0]:
                self._pictures = {one[0] for one in tracks[1:] if b"\x83\x81\x01" in one}
        if kind in NUMBERS and length > 8:
            raise Broken(NO_ELEMENT)
        if kind == SIMPLE_BLOCK:
            block = self._file.read(body, 4)
            # Three bits are reserved, and frames of pictures are not laced together.
            wrong = 0x76 if block[0] & 0x7F in self._pictures else 0x70
            foreign = self._tracks and (not block[0] & 0x80 or block[0] & 0x7F not in self._tracks)
            if foreign or block[3] & wrong:
                raise Broken(NO_ELEMENT, go_on=end)
        go_on = body if kind in self.entered else end
        if kind in self.summed and length <= MOST_SUMMED and self._file.read(body, 2) == b"\xbf\x84":
            data = self._file.read(body, length)
            if zlib.crc32(data[6:]) != int.from_bytes(data[2:6], "little"):
                raise Broken(WRONG_SUM, go_on=go_on)
        return go_on


class Boxes:
    """Fragmented MP4: the boxes of the file, of its fragments and of their tracks."""

    frames = 0
    begins = re.compile(rb"....(?:moof|styp|sidx)", re.DOTALL)
    known = frozenset(
        b"ftyp styp moov moof mdat free skip wide sidx ssix prft emsg mfra uuid meta udta pdin pnot "
        b"mfhd traf tfhd tfdt trun sdtp sbgp sgpd subs saiz saio senc".split()
    )
    end = 0

    def __init__(self, file: File, stream_id: int) -> None:
        self._file = file

    def step(self, at: int) -> int:
        """Return where the box at `at` ends, or its first child begins."""
        head = self._file.read(at, 16)
        length, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if kind not in self.known:
            raise Broken(NO_ELEMENT)
        if length == 0:
            return self._file.size
        length = int.from_bytes(head[8:16], "big") if length == 1 else length
        if length < 8:
            raise Broken(NO_ELEMENT)
        if at + length > self._file.size:
            raise Broken(CUT, go_on=self._file.size)
        return at + (8 if kind in (b"moof", b"traf") else length)


class Riff:
    """AVI: lists and chunks."""

    frames = 0
    begins = re.compile(rb"\d\d(?:dc|db|wb)|idx1|LIST|RIFF|JUNK")
    known = re.compile(rb"RIFF|LIST|JUNK|idx1|ix\d\d|(\d\d)(?:dc|db|wb|pc|tx|sb|iv)")

    def __init__(self, file: File, stream_id: int) -> None:
        self._file, self.end = file, 0
        header = file.read(0, 4096)
        at = header.find(b"avih")
        self._streams = int.from_bytes(header[at + 32 : at + 36], "little") if at > 0 else 100
        frame_us, stream = int.from_bytes(header[at + 8 : at + 12], "little"), header.find(b"vids", at) + 20
        scale, rate = (int.from_bytes(header[stream + k : stream + k + 4], "little") for k in (0, 4))
        ratio = 1e6 * scale / rate / frame_us if min(at, frame_us, scale, rate) > 0 else 1.0
        self._two_clocks = frame_us >= LEAST_FRAME_US and not 1 / MOST_RATIO < ratio < MOST_RATIO

    def step(self, at: int) -> int:
        """Return where the chunk at `at` ends, or the first one in a list begins."""
        head = self._file.read(at, 12)
        kind, length = head[:4], int.from_bytes(head[4:8], "little")
        found = self.known.fullmatch(kind)
        if kind != b"RIFF" and self.end and at >= self.end:
            return self._file.size
        if not found or (found[1] and int(found[1]) >= self._streams):
            raise Broken(NO_ELEMENT)
        stated = length not in (0, (1 << 32) - 1)
        if kind == b"RIFF":
            self.end = at + 8 + length if stated else 0
        end = at + 8 + length + length % 2
        if at == 0 and self._two_clocks:
            raise Broken("its header states two frame rates", go_on=at + 12)
        if kind == b"RIFF" or (kind == b"LIST" and head[8:12] in (b"movi", b"rec ")):
            return at + 12
        if end > self._file.size + 1:
            raise Broken(CUT, go_on=self._file.size)
        return end


class Tags:
    """FLV: the header, and tags with their lengths behind them."""

    frames = 0
    begins = re.compile(rb"[\x08\x09][^\0]?.{6,7}\0\0\0", re.DOTALL)
    end = 0

    def __init__(self, file: File, stream_id: int) -> None:
        self._file = file
        self._codec: int | None = None
        self._length = 0  # of all tags

    def step(self, at: int) -> int:
        """Return where the next tag begins."""
        if at == 0:
            return int.from_bytes(self._file.read(5, 4), "big") + 4
        head = self._file.read(at, 17)
        if len(head) < 11 or head[0] & 0xDF not in (8, 9, 18) or head[8:11] != b"\0\0\0":
            raise Broken(NO_ELEMENT)
        length = int.from_bytes(head[1:4], "big")
        end = at + 11 + length + 4
        if end > self._file.size:
            raise Broken(CUT, go_on=self._file.size)
        self._length += 11 + length
        # Writers count the length behind a tag in several ways.
        stated = int.from_bytes(self._file.read(end - 4, 4), "big")
        if stated not in (0, length, length + 10, length + 11, self._length):
            raise Broken(NO_ELEMENT, go_on=end)
        begin, pictures = head[11:13], head[0] & 0x1F == 9
        if not pictures and begin in (b"\x17\1", b"\x27\1"):
            raise Broken(NO_ELEMENT, go_on=end)  # a frame of H.264 in a tag of sound
        if pictures and (begin == b"\x27\0" or (begin == b"\x17\0" and head[16:] != b"\1")):
            raise Broken(NO_ELEMENT, go_on=end)  # one in place of the settings of its decoder
        if head[0] == 9 and head[11:] and not head[11] & 0x80:
            # Tags of pictures name the codec in four bits; only new ones, with the highest bit, do not.
            codec = head[11] & 0x0F
            if self._codec not in (None, codec):
                raise Broken(NO_ELEMENT, go_on=end)
            self._codec = codec
        return end


# Ogg's checksum goes through the bits in the other order than zlib's.
_TURNED = bytes(int(f"{one:08b}"[::-1], 2) for one in range(256))


class Pages:
    """Ogg: pages with checksums."""

    frames = 0
    begins = re.compile(rb"OggS\0")
    end = 0

    def __init__(self, file: File, stream_id: int) -> None:
        self._file = file

    def step(self, at: int) -> int:
        """Return where the page at `at` ends."""
        head = self._file.read(at, 27)
        if len(head) < 27 or head[:5] != b"OggS\0":
            raise Broken(NO_ELEMENT)
        lengths = self._file.read(at + 27, head[26])
        size = 27 + len(lengths) + sum(lengths)
        page = self._file.read(at, size)
        if len(page) < size:
            raise Broken(CUT)
        turned = (page[:22] + bytes(4) + page[26:]).translate(_TURNED)
        found = zlib.crc32(turned, 0xFFFFFFFF) ^ 0xFFFFFFFF
        if int(f"{found:032b}"[::-1], 2) != int.from_bytes(head[22:26], "little"):
            raise Broken(WRONG_SUM)
        return at + size


class Packets:
    """MPEG-TS: packets of 188 bytes, with 4 or 16 more in some; those of the pictures count from 0 to 15."""

    begins = re.compile(rb"G")
    end = 0
    many = 2048

    def __init__(self, file: File, stream_id: int) -> None:
        self._file, self._pid = file, stream_id
        self._count: int | None = None
        self._begun = False  # a table of programs came, with count 0
        self._stamp, self.frames = b"", 0  # the last time of a frame, and how many there were
        head = np.frombuffer(file.read(0, 204 * 8), np.uint8)
        sizes = [(size, skip) for size, skip in ((188, 0), (192, 4), (204, 0)) if (head[skip::size][:7] == 0x47).all()]
        self._size, self._skip = sizes[0] if sizes else (188, 0)

    def step(self, at: int) -> int:
        """Return where the packets end that begin at `at` and are in order."""
        size = self._size
        data = self._file.read(at, size * self.many)
        rows = np.frombuffer(data, np.uint8, len(data) // size * size).reshape(-1, size)[:, self._skip :]
        bad = np.flatnonzero(rows[:, 0] != 0x47)
        if len(bad):
            rows = rows[: bad[0]]
        if not len(rows):
            # Synchronous again where three packets follow each other.
            go_on = at + 1
            while (go_on := self._file.find(self.begins, go_on)) < self._file.size:
                if all(self._file.read(go_on + k * size, 1) in (b"G", b"") for k in (1, 2)):
                    break
                go_on += 1
            raise Broken(CUT if len(data) < size else NO_ELEMENT, go_on=max(at + 1, go_on - self._skip))
        pids = (rows[:, 1] & 0x1F).astype(int) << 8 | rows[:, 2]
        first = np.flatnonzero(pids == self._pid)
        tables = np.flatnonzero(pids[: first[0] if len(first) else None] == 0)
        if self._count is None and len(tables):
            self._begun = bool(rows[tables[0], 3] & 15 == 0)
        first = first[(rows[first, 3] & 0x10) > 0]
        counts = (rows[first, 3] & 15).astype(int)
        before = np.concatenate([[-1 if self._count is None else self._count], counts[:-1]])
        # Only packets that begin something or seem wrong are looked at one by one.
        doubtful = ((counts - before) & 15 != 1) | (before < 0) | (rows[first, 1] & 0xC0 > 0)
        for k in np.flatnonzero(doubtful):
            if why := self._fault(rows[first[k]], int(before[k])):
                self._count = int(counts[k])
                raise Broken(why, at + int(first[k]) * size, at + int(first[k] + 1) * size)
        if len(counts):
            self._count = int(counts[-1])
        return at + len(rows) * size

    def _fault(self, row: np.ndarray, before: int) -> str:
        """Return what is wrong with a packet of the pictures that follows one with the count `before`, or nothing."""
        count = int(row[3] & 15)
        extra = 1 + int(row[4]) if row[3] & 0x20 else 0
        flags = int(row[5]) if extra > 1 else 0
        begins = bool(row[1] & 0x40)
        if row[1] & 0x80:
            return "a packet is marked as damaged"
        start = row[4 + extra : 18 + extra].tobytes()
        if begins and start[:3] not in (b"\0\0\1", b""):
            return NO_ELEMENT
        if begins and start[7:8] >= b"\x80" and start[9:14] != self._stamp:
            self._stamp, self.frames = start[9:14], self.frames + 1
        if before < 0:
            missing = self._begun and count and not (begins and flags & 0x40)
            return "the first packets of the pictures are missing" if missing else ""
        if count not in (before, (before + 1) & 15) and not flags & 0x80:
            return "packets are missing"
        return ""


CHAINS: dict[str, Callable[[File, int], Ebml | Boxes | Riff | Tags | Pages | Packets]] = {
    "matroska": Ebml,
    "mov": Boxes,
    "avi": Riff,
    "flv": Tags,
    "ogg": Pages,
    "mpegts": Packets,
}


def walk(path: Path, container: str, stream_id: int) -> Iterator[Place]:
    """Give every place that the walk through a file reaches, in order; nothing for other formats than `CHAINS`.

    Args:
        path: the file.
        container: FFmpeg's name of its format.
        stream_id: the container's number of the stream of pictures.
    """
    if container not in CHAINS:
        return
    file = File(path)
    try:
        chain = CHAINS[container](file, stream_id)
        at = 0
        while at < file.size:
            try:
                at = chain.step(at)
                yield Place(at, "", chain.frames)
            except Broken as broken:
                yield Place(at if broken.at is None else broken.at, str(broken), chain.frames)
                at = file.find(chain.begins, at + 1) if broken.go_on is None else broken.go_on
        if chain.end > file.size:
            yield Place(file.size, CUT, chain.frames)
    finally:
        file.close()


class Follower:
    """Walks a file as far as its packets were read.

    Args:
        places: of `walk`.
    """

    def __init__(self, places: Iterator[Place]) -> None:
        self._places, self._at = places, 0
        self.frames = 0  # that begin in what was walked through; 0 where it is not known
        self._held: list[Place] = []

    def up_to(self, at: float) -> str:
        """Walk on to a place; return how the file is broken between it and the place before, or nothing."""
        while self._at < at and (place := next(self._places, None)):
            self._at, self.frames = place.at, place.frames
            if place.why:
                self._held.append(place)
        met = [place.why for place in self._held if place.at < at]
        self._held = [place for place in self._held if place.at >= at]
        return met[0] if met else ""
