"""From the packets of a video stream to its frames: one pass, which decodes.

Reading goes on after packets that cannot be decoded. Frames are converted to RGB only when somebody
looks at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from protokv.video.clock import ArrivalClock, PacketClock, PacketTiming
from protokv.video.container import explain_ffmpeg_error
from protokv.video.losses import FrameLosses
from protokv.video.probe import STALE_MEMORY_DECODERS, StreamProbe
from protokv.video.source import Frame, Image, ShouldStop

# Containers whose header states a length. FFmpeg takes that of others from their last time stamps,
# or from their bytes.
_STATING = {"mov", "flv", "asf"}

# A source that ends this many seconds before the end that it declares is not cut short.
_HONEST_S = 0.5

# Bytes of packets that wait while the key frame before a time is looked for.
_WAITING_BYTES = 256 << 20


def skip_to_key_frame(
    timing: PacketTiming, packets: Iterator[Any], start_s: float
) -> Iterator[Any]:
    """Skip to the last key frame before the first packet that is later than `start_s`.

    If too much would have to wait, reading begins at the first key frame that waits.
    """
    waiting: list[Any] = []
    size = 0
    for packet in packets:
        later = packet is not None and timing.latest_s(packet) > start_s
        if packet is not None and packet.is_keyframe and not later:
            waiting = []
            size = 0
        waiting.append(packet)
        size += packet.size if packet is not None else 0
        if later or size > _WAITING_BYTES:
            break
    yield from waiting
    yield from packets


class FrameDecoder:
    """One pass of a decoder over the packets of a stream, and the account of it: `losses`."""

    def __init__(
        self,
        found: StreamProbe,
        stream: Any,
        losses: FrameLosses,
        convert: Callable[[Any], Image],
        *,
        sought: bool = False,
        after_key: bool = False,
        arrivals: ArrivalClock | None = None,
    ) -> None:
        """Begin before the first packet of PyAV's stream; with `sought`, after a seek.

        `convert` makes a picture of PyAV's frame when somebody looks at it. With `after_key`,
        frames before the first key frame are dropped and not counted as lost, since their packets
        were skipped. The frames of a live stream have their times from `arrivals` and are not
        matched with packets.
        """
        losses.matching = arrivals is None
        stream.codec_context.flush_buffers()
        self._found = found
        self._timing = found.timing
        self._stream = stream
        self._context = stream.codec_context
        self.losses = losses
        self._convert = convert
        self._drop_leading = after_key
        self._arrivals = arrivals
        self._pixels = STALE_MEMORY_DECODERS.get(self._context.name, b"")
        self._key_s: float | None = None  # time of the first key frame since the count began
        self._next_ticks = found.timing.origin  # time of a frame without a time stamp
        # times of frames whose packets the container marked as corrupt
        self._corrupt_s: set[float] = set()
        self._last_dts: int | None = None
        self._end_s = 0.0
        losses.interval_s = found.timing.interval_s
        self._clock = PacketClock(found.timing, losses, from_origin=not sought)

    def settle(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Give packets with stamps of one clock, and None before a packet that begins a new
        count.
        """
        if self._arrivals is not None:
            yield from self._arrivals.settle(packets)
            return
        for packet in self._clock.settle(map(self._watch, packets)):
            if packet is not None and (ticks := self._timing.stamp(packet)) is not None:
                time_s = self._timing.time_s(ticks)
                self._end_s = max(
                    self._end_s, time_s + (self._timing.stays_s(time_s, packet) or 0.0)
                )
            yield packet

    def _watch(self, packet: Any) -> Any:
        self._last_dts = packet.dts if packet.dts is not None else self._last_dts
        return packet

    def frames(self, packets: Iterable[Any], should_stop: ShouldStop) -> Iterator[Frame]:
        """Give the frames of settled packets, to the last one or until `should_stop`."""
        for packet in chain(packets, [None]):
            if should_stop():
                return
            if packet is not None:
                self._expect(packet)
            for decoded in self._decode(packet):
                if (frame := self._place(decoded)) is not None and not should_stop():
                    yield frame
            if packet is None:
                # The next packets do not refer to what came before.
                self._context.flush_buffers()
                self._drop_leading = self._drop_leading or self._key_s is not None
                self._key_s = None
        self.losses.finish()
        if self._arrivals is None:
            self.check_end()

    def expected_s(self, packet: Any) -> float | None:
        """Return the stream time of the frame that a packet should give; None if it should give
        none, or the time is unknown.
        """
        if packet.pts is None or packet.is_discard or not self._timing.has_pts:
            return None
        is_hidden = _HIDDEN.get(self._found.info.codec)
        hidden = is_hidden is not None and packet.size and is_hidden(memoryview(packet))
        return None if hidden else self._timing.time_s(packet.pts)

    def _expect(self, packet: Any) -> None:
        """Await the frame that a packet should give, if it can be decoded."""
        due_s = self.expected_s(packet)
        if self._key_s is None and packet.is_keyframe:
            self._key_s = due_s if due_s is not None else -math.inf
        if due_s is None:
            return
        if packet.is_corrupt:
            self._corrupt_s.add(due_s)
        # Frames before the first key frame are lost, unless a seek skipped their packets.
        if not self._drop_leading if self._key_s is None else self._key_s <= due_s:
            self.losses.expect(due_s)

    def _decode(self, packet: Any) -> list[Any]:
        """Return the decoder's frames for a packet, or its last ones for None. What fails is
        reported.
        """
        if packet is not None:
            # Another recording may have another codec; None came before it.
            self._context = packet.stream.codec_context
        try:
            if self._pixels and packet is not None and self._pixels not in bytes(packet):
                raise ValueError("a picture without pixels")
            return list(self._context.decode(packet))
        except Exception as error:  # PyAV raises more than its own errors on damaged packets
            if packet is not None:
                self.losses.note_failure(self.expected_s(packet), explain_ffmpeg_error(error))
            return []

    def _place(self, decoded: Any) -> Frame | None:
        """Return a decoded frame at its time; None if it is to be left out."""
        timing = self._timing
        losses = self.losses
        ticks = self._timing.stamp(decoded)
        time_s: float | None
        if self._arrivals is not None:
            time_s = self._arrivals(None if ticks is None else float(ticks * timing.time_base))
        else:
            # AVI gives no times for the last frames, and raw streams give none at all.
            ticks = self._next_ticks if ticks is None else ticks - timing.delay
            time_s = timing.time_s(ticks)
        if decoded.interlaced_frame:
            # The two fields of a frame may come in two packets.
            losses.matching = False
        if time_s is None or (
            self._drop_leading and self._key_s is not None and time_s < self._key_s
        ):
            return None
        if time_s < 0:
            losses.note_damage(0.0, "a picture is before the beginning")
            return None
        if not losses.take(time_s):
            return None
        marked = time_s in self._corrupt_s and ticks not in self._clock.excused
        if marked or decoded.is_corrupt:
            losses.note_damage(time_s, "a frame is marked as corrupt")
        self._corrupt_s.discard(time_s)
        picture = partial(self._convert, decoded)
        if self._arrivals is not None or ticks is None:
            return Frame(time_s, picture, None, "pyav")
        self._next_ticks = ticks + (decoded.duration or timing.length(timing.interval_s))
        return Frame(time_s, picture, timing.stays_s(time_s, decoded), "pyav")

    def check_end(self) -> None:
        """Count frames that the index or the stated end promises after the last packet."""
        timing = self._timing
        losses = self.losses
        end_s = max(self._end_s, losses.start_s)
        stated_s = timing.duration_s or 0.0
        missing = 0
        if self._found.indexed:
            after = timing.ticks(losses.start_s) - 1 if self._last_dts is None else self._last_dts
            missing = sum(entry.timestamp > after for entry in self._stream.index_entries)
            # An edit list may cut away what the declared end counts, and not to the second.
            honest_s = max(2.0, 0.25 * stated_s)
        elif timing.declared_s is not None:
            honest_s = max(_HONEST_S, 2 * timing.interval_s)
        elif self._found.info.container in _STATING:
            honest_s = max(2.0, 0.02 * stated_s)
        else:
            honest_s = math.inf
        gap_s = stated_s - end_s
        if missing or gap_s > max(honest_s, 2 * timing.interval_s):
            missing = missing or max(1, round(gap_s / timing.interval_s))
            losses.add(end_s, "the file ends before the end that it declares", lost=missing)


def _is_hidden_vp8(data: memoryview) -> bool:
    return data[0] & 0x11 == 1  # key frames are always shown


def _is_hidden_vp9(data: memoryview) -> bool:
    if data[-1] & 0xE0 == 0xC0:
        return False  # several frames, of which one is shown
    # Marker, profile, one reserved bit of profile 3, show_existing_frame, frame_type, show_frame
    bits = data[0] << 1 if data[0] & 0x30 == 0x30 else data[0]
    return bits & 8 == 0 and bits & 2 == 0


# Whether a packet holds a reference frame only, which is never shown.
_HIDDEN = {"vp8": _is_hidden_vp8, "vp9": _is_hidden_vp9}
