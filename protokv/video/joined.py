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

# Pictures in a row of a stream that is not beside the watched one but between two parts of it; so
# many are enough where the clock of the watched one breaks: goes back, or leaps further than ever.
_MANY = 64
_FEW = 4
_LEAP = 2

# Where that stream began after the container was opened, the bytes in which it is looked for, and
# how many times as wide as others a gap between two packets is, if no clock breaks there.
_MOST_BYTES = 64 << 20
_WIDE = 8

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
        # the streams that do not follow: this one, and those that are seen beside it
        self.known = {identify_stream(stream)}
        self._taken = 0
        # Packets of other streams since the last one that was taken: their streams, how many they
        # are, and at which byte the first of each stream begins.
        self._others = dict[tuple[int, str], int]()
        self._run = 0
        self._last: int | None = None  # the DTS of the last packet, and the longest step to one
        self._longest = 0
        self.over = False  # another recording follows, although packets of this stream come again
        self.pipe = getattr(container.file, "file", None)
        if self.pipe is not None and not self.joins:
            self.pipe.keep_none()

    def demux(self) -> Any:
        """Return PyAV's packets of the stream, and those of the streams beside it."""
        streams = self.container.streams.video if self.joins else [self.stream]
        return self.container.demux([one for one in streams if one.codec_context is not None])

    def take(self, packet: Any) -> bool:
        """Note a packet with bytes; return True if it is of the stream, and the part goes on."""
        place = packet.pos or 0
        if packet.stream is not self.stream:
            self._others.setdefault(identify_stream(packet.stream), place)
            self._run += 1
            return False
        # The last one of a recording comes late, behind the first ones of the next.
        before = {one for one, at in self._others.items() if at < place}
        least = _FEW if self._breaks(packet.dts) else _MANY
        between = before - self.known and self._run >= least
        if self._taken >= least and (between or self._skips_another(place, least)):
            self.over = True
            return False
        if before:
            self.known |= before
            self._others.clear()
            self._run = 0
        self.end = place
        if self.pipe is not None:
            self.pipe.keep_from(place)
        self._taken += 1
        if self._last is not None and packet.dts is not None:
            self._longest = max(self._longest, packet.dts - self._last)
        self._last = packet.dts
        return True

    def _breaks(self, dts: int | None) -> bool:
        """Return True if the clock goes back to a DTS, or leaps to it."""
        if self._last is None or dts is None:
            return False
        return not 0 < dts - self._last <= _LEAP * self._longest

    def _skips_another(self, place: int, least: int) -> bool:
        """Return True if at least so many pictures of another stream stand between the last packet
        and one at `place`. PyAV gives no packets of a stream that begins after it was opened.
        """
        size = place - self.end
        if least == _MANY and size * self._taken <= _WIDE * (self.end - self._begin):
            return False
        if self.pipe is not None:
            data = self.pipe.read_again(min(size, _MOST_BYTES))
        elif self._path is not None:
            with Path(self._path).open("rb") as file:
                file.seek(self.end)
                data = file.read(min(size, _MOST_BYTES))
        else:
            return False
        beside = {self.stream.id, *(number for number, _ in self.known)}
        packets = range(0, len(data) - TS_PACKET_BYTES, TS_PACKET_BYTES)
        begun = (_PICTURE.match(data, at, at + TS_PACKET_BYTES) for at in packets)
        numbers = (int.from_bytes(one[1]) & _PID_BITS for one in begun if one)
        return sum(number not in beside for number in numbers) >= least

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
                # These were the last bytes of sound, where PIDs are swapped: the stream follows.
                self.known.discard(identify_stream(self.stream))
            return True
        return False

    @property
    def ended(self) -> bool:
        """What follows may be opened: some packets came, in a container that may be joined."""
        return self.joins and self.end > self._begin
