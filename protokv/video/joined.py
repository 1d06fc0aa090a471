"""Recordings that were put together in one MPEG-TS: where the watched stream ends, or becomes
another, what follows is opened anew from that byte on.

PyAV drops the packets of a stream that begins in the middle. FFmpeg's own way out
(`merge_pmt_versions`) keeps the old codec, and crashes at the third recording.
"""

from __future__ import annotations

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

# Packets in a row of a stream that is not beside the watched one but between two parts of it.
_MANY = 64


def identify_stream(stream: Any) -> tuple[int, str]:
    """Return the PID and the codec of PyAV's stream when it was opened."""
    return stream.id, stream.codec_context.name


class JoinedPart:
    """The watched stream in one opening of a container, and where it ends."""

    def __init__(self, container: Any, stream: Any, begin: int = 0) -> None:
        """Begin at a byte of the file; a pipe counts from where it was opened anew."""
        self.container = container
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
        if before - self.known and min(self._run, self._taken) >= _MANY:
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
        return True

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
            return True
        return False

    @property
    def ended(self) -> bool:
        """What follows may be opened: some packets came, in a container that may be joined."""
        return self.joins and self.end > self._begin
