"""What the header and the first frame of a stream tell of it: `look_into`, and `Probe` of its times.

Stream time begins where the container begins, as in players: at its first picture or sound. So pictures, words and
evidence have one origin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import av

from protokv.video.clock import BEYOND_END_PART, BEYOND_END_S, LONGEST_GAP_S, LONGEST_PAUSE_S
from protokv.video.container import describe_stream, refuse_encrypted, refuse_undecodable
from protokv.video.source import SourceInfo

# These have no presentation times. FFmpeg guesses them wrongly for reordered frames; the order of decoding holds.
WITHOUT_PTS = {"avi", "asf"}

# The header of these declares an end, apart from the times of the frames.
DECLARING = {"avi", "matroska"}

# The length that these state is counted from 0, and not from where they begin.
COUNTING_FROM_ZERO = {"matroska", "avi", "flv", "nut"}

# These state a length too, in their header; that of others comes from their last time stamps, or from their bytes.
STATING = {"mov", "flv", "asf"}

# A length that is guessed from time stamps is none if it is this long and has fewer bits a second: stamps jump.
FEWEST_BITS = 10_000


# No camera gives more frames a second.
MOST_FPS = 1000

# Packets that may fail, and bytes that are read, before the first frame.
MOST_FAILURES, MOST_BYTES = 256, 256 << 20

# AVFMT_NOTIMESTAMPS, of raw streams
_NOTIMESTAMPS = 1 << 7


@dataclass(frozen=True)
class Probe:
    """How a stream counts its times; `time_s = (ticks - origin) * time_base`."""

    container: str
    codec: str
    time_base: Fraction
    origin: int
    interval_s: float  # the usual distance of two frames
    duration_s: float | None  # stream time of the end that the source states
    declared_s: float | None  # the same, if it does not come from the times of the packets
    confirmed_s: float  # until when anything else than the packets of the pictures says that the source lasts
    indexed: bool  # the container has an index of all packets, to compare with the packets that were read
    stamped: bool  # packets have times
    steady: bool  # `interval_s` comes from the source
    delay: int = 0  # how much later the decoding time of a frame is than that of its packet, without presentation times

    @property
    def has_pts(self) -> bool:
        """True if the container has presentation times."""
        return self.container not in WITHOUT_PTS

    def time_s(self, ticks: int) -> float:
        """Return the stream time of a tick."""
        return float((ticks - self.origin) * self.time_base)

    def ticks(self, time_s: float) -> int:
        """Return the tick at or before a stream time."""
        return self.origin + int(Fraction(time_s) / self.time_base)

    def stamp(self, frame: Any) -> int | None:
        """Return the presentation ticks of a decoded frame; None if it has none."""
        ticks = frame.pts if self.has_pts and frame.pts is not None else frame.dts
        return None if ticks is None else int(ticks) - self.delay

    def expected_s(self, packet: Any) -> float | None:
        """Return the stream time of the frame that a packet should give; None if none is due or it is unknown."""
        if packet.pts is None or packet.is_discard or not self.has_pts:
            return None
        hidden = self.codec in _HIDDEN and packet.size and _HIDDEN[self.codec](memoryview(packet))
        return None if hidden else self.time_s(packet.pts)


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


class Beginning(NamedTuple):
    """What a look at the beginning of a stream found."""

    probe: Probe
    info: SourceInfo
    notes: list[str]
    packets: Iterator[Any]  # all of them, from the first one on
    plain: bool  # progressive, and shown in the shape in which it is decoded


def look_into(
    name: object, kind: str, container: Any, stream: Any, packets: Iterator[Any], max_pixels: int
) -> Beginning:
    """Decode the first frame of PyAV's video stream, so that one without a picture is refused.

    Raises:
        SourceUnreadable: no picture can be had, or it is encrypted, or has more than `max_pixels`.
    """
    context, first, failures, size = stream.codec_context, None, 0, 0
    seen: list[Any] = []
    for packet in chain(packets, [None]):
        if not seen:
            refuse_encrypted(name, context, packet)
        if packet is not None:
            seen.append(packet)
            size += packet.size
        try:
            first = next(iter(context.decode(packet)), None) if seen else None
        except Exception:  # PyAV raises more than its own errors on a damaged file
            failures += 1
        if first is not None or failures > MOST_FAILURES or size > MOST_BYTES:
            break
    if first is None:
        raise refuse_undecodable(name, container, stream, seen[0] if seen else None, max_pixels)
    head = seen[0]
    probe = _probe(container, stream, head)
    if not probe.has_pts:
        probe = replace(probe, delay=(probe.stamp(first) or 0) - (head.dts or 0))
    info, notes = describe_stream(str(name), kind, container, stream, first)
    info = replace(info, rate_fps=1 / probe.interval_s if probe.steady else None)
    if not probe.stamped:
        notes.append(f"it has no times: {1 / probe.interval_s:.6g} frames a second are assumed")
    same = sorted((info.width, info.height)) == sorted((first.width, first.height)) and not info.mirrored
    # 0 is unknown, 1 progressive.
    progressive = not first.interlaced_frame and context.field_order <= 1
    return Beginning(probe, info, notes, chain(seen, packets), same and progressive)


def _probe(container: Any, stream: Any, first: Any) -> Probe:
    """Return how a stream counts its times; what a damaged header says is kept within what is credible."""
    name, base = container.format.name.split(",")[0], stream.time_base
    # `frames` is 0 for fragmented files, whose index grows while they are read.
    indexed = name == "mov" and bool(stream.frames) and len(stream.index_entries) > 0
    first_ticks = first.dts if first.pts is None or name in WITHOUT_PTS else first.pts
    whole_s = container.duration / av.time_base if (container.duration or 0) > 0 else None
    own_s = _own_length_s(stream)
    declares = indexed or name in DECLARING
    ends_s = [one for one in (own_s, whole_s) if one is not None]
    # A copied tag of a stream of Matroska may say less than the whole.
    limit_s = max(ends_s) if declares and ends_s else None

    origin = _origin(container, stream, first_ticks or 0, limit_s)
    late_s = max(0.0, float(origin * base))
    shift_s = float((stream.start_time - origin) * base) if stream.start_time is not None else 0.0
    if name in COUNTING_FROM_ZERO:
        # FLV may count from the start.
        shift_s = -late_s if ends_s and (name == "matroska" or late_s < max(ends_s)) else 0.0
        whole_s = None if whole_s is None else whole_s + shift_s
    # With other streams, the whole may be longer than the video.
    stated_s = whole_s if own_s is None and len(container.streams) == 1 else None
    if own_s is not None:
        stated_s = own_s + shift_s if whole_s is None else min(own_s + shift_s, whole_s)
    if stated_s is not None:
        stated_s = max(0.0, stated_s)
        bits = 8 * (container.size or 0)
        if not declares and stated_s > LONGEST_PAUSE_S and bits < FEWEST_BITS * stated_s:
            stated_s = None
    declared_s = stated_s if declares else None
    if declared_s is not None and whole_s is not None and name == "matroska":
        declared_s = max(declared_s, whole_s)
    others = [one for one in container.streams if one is not stream and one.start_time is not None and one.duration]
    ends_s = [float((one.start_time + one.duration) * one.time_base - origin * base) for one in others]
    if whole_s is not None and (declares or name == "flv"):
        ends_s.append(whole_s)
    stamped = not container.format.flags & _NOTIMESTAMPS
    rates = (stream.average_rate if stamped else None, stream.guessed_rate)
    # FFmpeg guesses the rate of the clock where there are few frames.
    rate = next((one for one in rates if one and one <= MOST_FPS), None)
    if not stamped and first.duration:
        rate = 1 / (first.duration * base)
    return Probe(
        container=name,
        codec=stream.codec_context.codec.canonical_name,
        time_base=base,
        origin=origin,
        interval_s=float(1 / rate) if rate else 0.04,
        steady=rate is not None,
        duration_s=stated_s,
        declared_s=declared_s,
        confirmed_s=max([declared_s or 0.0, *ends_s]),
        indexed=indexed,
        stamped=stamped,
    )


def _origin(container: Any, stream: Any, first: int, limit_s: float | None) -> int:
    """Return the tick at which the container begins; that of the first packet, if that is far from there."""
    base = stream.time_base
    starts_s = [] if container.start_time is None else [container.start_time / av.time_base]
    own = stream.start_time
    if own is not None and (not starts_s or abs(float(own * base) - starts_s[0]) < 1e-5):
        stated = int(own)  # exact, where the container counts in microseconds
    elif starts_s:
        stated = round(starts_s[0] / float(base))
    else:
        return first
    late_s = float((first - stated) * base)
    far_s = LONGEST_GAP_S if limit_s is None else limit_s * (1 + BEYOND_END_PART) + BEYOND_END_S
    return first if late_s > far_s else min(first, stated)


def _own_length_s(stream: Any) -> float | None:
    """Return the length of the pictures, as the stream, or a tag of Matroska in words, states it."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    tag = next((value for key, value in stream.metadata.items() if key.upper() == "DURATION"), "")
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", tag)
    return int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3]) if match else None
