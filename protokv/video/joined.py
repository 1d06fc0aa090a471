"""Recordings that were put together in one MPEG-TS: where the watched stream ends, or becomes
another, what follows is opened anew from that byte on.

PyAV drops the packets of a stream that begins in the middle. FFmpeg's own way out
(`merge_pmt_versions`) keeps the old codec, and crashes at the third recording.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from av.bitstream import BitStreamFilterContext

# Filters that take one codec alone. PyAV does not tell that a stream has another one by now.
_FILTERS = {
    "h264": "h264_mp4toannexb",
    "hevc": "hevc_mp4toannexb",
    "vvc": "vvc_mp4toannexb",
    "mpeg2video": "mpeg2_metadata",
    "mpeg4": "mpeg4_unpack_bframes",
}

TS_PACKET_BYTES = 188

# So many pictures of another stream between two packets of the watched one are another recording; a
# few are enough where its clock breaks: goes back, or leaps further than ever.
_MANY = 64
_FEW = 4
_LEAP = 2

# Between two packets that are this many times as wide apart as others another recording is looked
# for, in so many bytes.
_WIDE = 8
_MOST_BYTES = 64 << 20

# A packet of MPEG-TS in which a picture begins. Its PID is in the 13 last bits of two bytes.
_PICTURE = re.compile(rb"G([\x40-\x7f].).{1,170}?\0\0\x01[\xe0-\xef]", re.DOTALL)
_PID_BITS = 0x1FFF


def identify_stream(stream: Any) -> tuple[int, str]:
    """Return the PID and the codec of PyAV's stream when it was opened."""
    return stream.id, stream.codec_context.name


class JoinedPart:
    """The watched stream in one opening of a container, and where it ends."""

    def __init__(
        self, container: Any, stream: Any, begin: int = 0, path: str | None = None
    ) -> None:
        """Begin at a byte of the file at `path`; a pipe counts from where it was opened anew."""
        self.container = container
        self._path = path
        self.stream = stream
        # Another part may follow.
        self.joins = container.format.name == "mpegts"
        self.end = self._begin = begin  # the byte at which its last packet begins
        self._beside = {stream.id}  # PIDs of this stream, and of those that are shown beside it
        self._follows = False  # what follows may be the same stream
        self._taken = 0
        self._last: int | None = None  # the DTS of the last packet, and the longest step to one
        self._longest = 0
        self.over = False  # another recording follows, although packets of this stream come again
        self.pipe = getattr(container.file, "file", None)
        if self.pipe is not None and not self.joins:
            self.pipe.keep_none()

    def demux(self) -> Any:
        """Return PyAV's packets of the stream."""
        return self.container.demux(self.stream)

    @property
    def known(self) -> set[tuple[int, str]]:
        """The streams that do not follow: this one, and those beside it."""
        return {
            identify_stream(one)
            for one in self.container.streams.video
            if (one.id in self._beside if one is not self.stream else not self._follows)
        }

    def take(self, packet: Any) -> bool:
        """Note a packet with bytes; return True if the part goes on with it."""
        if not self.joins:
            return True
        place = packet.pos or 0
        if 0 < self._taken < _FEW:
            self._beside.update(self._find_pictures(place))
        elif self._taken and self._skips_another(packet.dts, place):
            self.over = True
            return False
        self.end = place
        if self.pipe is not None:
            self.pipe.keep_from(place)
        self._taken += 1
        if self._last is not None and packet.dts is not None:
            self._longest = max(self._longest, packet.dts - self._last)
        self._last = packet.dts
        return True

    def _skips_another(self, dts: int | None, place: int) -> bool:
        """Return True if another recording stands between the last packet and one of this DTS at
        `place`. PyAV gives no packets of a stream that begins after it was opened.
        """
        least = _MANY
        if self._last is not None and dts is not None:
            step = dts - self._last
            least = _MANY if 0 < step <= _LEAP * self._longest else _FEW
        wide = (place - self.end) * self._taken > _WIDE * (self.end - self._begin)
        if self._taken < least or not (wide or least == _FEW):
            return False
        return sum(pid not in self._beside for pid in self._find_pictures(place)) >= least

    def _find_pictures(self, place: int) -> list[int]:
        """Return the PIDs of the pictures that begin between the last packet and `place`."""
        size = min(max(0, place - self.end), _MOST_BYTES)
        data = b""
        if self.pipe is not None:
            data = self.pipe.read_again(size)
        elif self._path is not None:
            with Path(self._path).open("rb") as file:
                file.seek(self.end)
                data = file.read(size)
        packets = range(0, len(data) - TS_PACKET_BYTES, TS_PACKET_BYTES)
        begun = (_PICTURE.match(data, at, at + TS_PACKET_BYTES) for at in packets)
        return [int.from_bytes(one[1]) & _PID_BITS for one in begun if one]

    def becomes_another(self) -> bool:
        """Return True if the stream has another codec than at the beginning; the packet that was
        taken last is the last one of before.
        """
        known = _FILTERS.get(self.stream.codec_context.name)
        if not self.joins or known is None:
            return False
        try:
            BitStreamFilterContext(known, self.stream)
        except Exception:  # of FFmpeg: it takes other codecs
            if self._taken < _MANY:
                # These were the last bytes of sound, where PIDs are swapped.
                self._follows = True
            return True
        return False

    @property
    def ended(self) -> bool:
        """What follows may be opened: some packets came, in a container that may be joined."""
        return self.joins and self.end > self._begin
