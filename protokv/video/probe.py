"""Look into a video file: its header, its first frame, and its packets from a given time on.

`probe` decodes the first frame, so that a file without a picture is refused on opening. Stream time begins at the start
of the video stream. The sources decode the packets.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from protokv.errors import SourceError, SourceUnreadable
from protokv.video.container import MAX_PIXELS, describe, opened, reason
from protokv.video.file import fingerprint
from protokv.video.movie import header_fault
from protokv.video.report import DecodeReport
from protokv.video.source import SourceInfo, TextTrack
from protokv.video.stamps import LONGEST_GAP_WITHOUT_END_S, Timeline
from protokv.video.structure import Follower, walk
from protokv.words.tracks import tracks_of

# AVI has no presentation times. FFmpeg guesses them wrongly for reordered frames; the order of decoding holds.
WITHOUT_PTS = {"avi"}

# The first frame of these is a key frame; others may be recorded from anywhere in a stream.
BEGINNING_WITH_KEY = {"mov", "matroska", "avi"}

# The times of these begin at 0, and not at some time of a clock.
FROM_ZERO = {"mov", "matroska", "flv", "ogg"}

# The length that these state is counted from 0, and not from their first frame.
COUNTING_FROM_ZERO = {"matroska", "avi", "flv", "nut"}

# Seconds between two frames; less is no frame rate but a damaged clock.
LEAST_INTERVAL_S = 1e-4

# The header of these declares an end, apart from the times of the frames.
DECLARING = {"avi", "matroska"}

# Ends that are declared twice may differ by this much.
HONEST_S, HONEST_PART = 0.5, 0.02

# Frames that a codec can hold back, or that lead a key frame.
MOST_REORDERED = 32

# A last frame that is this much later than the one before it and than the declared end has a damaged time.
LEAP_S = 1.0

NO_FRAME = "its bytes are no frame"

# Packets in a row that may fail before the first frame.
MOST_FAILURES = 256

# Failures of the demultiplexer in a row, and packets in a row of streams that it does not know.
MOST_DEMUX_FAILURES, MOST_STRANGERS = 16, 1 << 20

# Bytes of packets that are held while looking for the key frame before a time.
HELD_BYTES = 256 << 20

# These containers have no index, or none of the whole file.
WITHOUT_INDEX = {"mpegts", "mpeg", "h264", "hevc", "flv"}


@dataclass(frozen=True)
class Probe:
    """The facts of a file from its header and its first frame; `time_s = (ticks - origin) * time_base`."""

    path: Path
    info: SourceInfo  # `duration_s` is the stream time of the end that the file declares
    interlaced: bool
    reordered: bool  # frames are shown in another order than they are decoded in
    time_base: Fraction
    origin: int
    indexed: bool  # the container has an index of all packets, to compare with the packets that were read
    timeline: Timeline
    stream_id: int = 0  # of the pictures, in the container
    frames: int = 0  # that the header declares; 0: not said
    fault: str = ""  # what is wrong with the header of an MP4
    clock: float = 1.0  # how long the header says that the file is, over how long a tag says; 1.0: the same
    max_pixels: int = MAX_PIXELS
    texts: tuple[TextTrack, ...] = ()

    @property
    def rate_fps(self) -> float:
        """Frames a second, to count what is missing."""
        rate = self.info.rate_fps or 1.0
        if rate * LEAST_INTERVAL_S > 1.0 and self.frames and self.info.duration_s:
            return self.frames / self.info.duration_s
        return rate

    @property
    def has_pts(self) -> bool:
        """True if the container has presentation times."""
        return self.info.container not in WITHOUT_PTS

    def follow(self) -> Follower:
        """Begin a walk through the structure of the file. An index of all packets makes it needless."""
        return Follower(iter(()) if self.indexed else walk(self.path, self.info.container, self.stream_id))

    def time_s(self, ticks: int) -> float:
        """Return the stream time of a tick."""
        return float((ticks - self.origin) * self.time_base)

    def ticks(self, time_s: float) -> int:
        """Return the tick at or before a stream time."""
        return self.origin + int(Fraction(time_s) / self.time_base)

    def stamp(self, frame: Any) -> int | None:
        """Return the presentation ticks of a decoded frame; None if it has none."""
        return _stamp(self.info.container, frame)

    def hides(self, packet: Any) -> bool:
        """Return True for a reference frame of VP8 that is never shown. Key frames are."""
        return self.info.codec == "vp8" and bytes(packet)[0] & 0x11 == 1

    def expected_s(self, packet: Any) -> float | None:
        """Return the stream time of the frame that a packet should give; None if none is due or it cannot be told."""
        if packet.pts is None or packet.is_discard or not self.has_pts:
            return None
        if self.hides(packet):
            return None
        return self.time_s(packet.pts)


def probe(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> Probe:
    """Look into a file.

    Raises:
        SourceUnreadable: no picture can be had, or one of more than `max_pixels`.
    """
    path = Path(path)
    with opened(path, max_pixels) as (container, stream):
        try:
            return _probe(path, container, stream, max_pixels)
        except SourceError:
            raise
        except Exception as error:
            raise SourceUnreadable(
                f"{path} cannot be read as a video: {reason(error)}", hint="the file is damaged; copy it again"
            ) from error


def _probe(path: Path, container: Any, stream: Any, max_pixels: int) -> Probe:
    first, begin = _first_frame(container, stream, path)
    info = describe(path.name, "file", container, stream, first)
    name, base = info.container, stream.time_base
    # `frames` is 0 for fragmented files, whose index grows while they are read.
    indexed = name == "mov" and bool(stream.frames) and len(stream.index_entries) > 0
    whole_s = container.duration / av.time_base if (container.duration or 0) > 0 else None
    promised_s = _promised_end_s(container, stream, whole_s)
    # Elsewhere the end is guessed from the last time stamps, or from the bytes per second.
    end_s = promised_s if indexed or name in DECLARING else None
    if end_s is not None and name == "matroska" and whole_s is not None:
        end_s = max(end_s, whole_s)  # a copied tag of the stream may say less
    timeline = Timeline(end_s)
    origin = _origin(name, stream, first, timeline)
    if not indexed and Follower(walk(path, name, stream.id)).up_to(begin):
        origin = _lost_origin(name, container, stream, origin, whole_s)
    clock = whole_s / tagged_s if whole_s and (tagged_s := _tagged_s(stream)) and name == "matroska" else 1.0
    late_s = max(0.0, float(origin * base))
    if promised_s is not None and name in COUNTING_FROM_ZERO and (name == "matroska" or late_s < promised_s):
        promised_s = max(0.0, promised_s - late_s)  # FLV may count from the start
    return Probe(
        path=path,
        info=replace(info, duration_s=promised_s, size_bytes=path.stat().st_size, fingerprint=fingerprint(path)),
        # 0 is unknown, 1 progressive.
        interlaced=bool(first.interlaced_frame) or stream.codec_context.field_order > 1,
        reordered=bool(stream.codec_context.has_b_frames),
        time_base=base,
        origin=origin,
        indexed=indexed,
        timeline=timeline,
        stream_id=stream.id,
        frames=stream.frames,
        fault=header_fault(path, stream.id, stream.frames, len(stream.index_entries)) if indexed else "",
        clock=clock if abs(clock - 1.0) > 2 * HONEST_PART else 1.0,
        max_pixels=max_pixels,
        texts=tracks_of(container),
    )


def _first_frame(container: Any, stream: Any, path: Path) -> tuple[Any, int]:
    """Return the first frame that can be decoded, and the place in the file of the first packet."""
    demux = container.demux(stream)
    failures, begin = 0, -1
    while failures <= MOST_FAILURES:
        try:
            packet = next(demux)
            begin = packet.pos or 0 if begin < 0 else begin
            for frame in packet.decode():
                return frame, begin
        except StopIteration:
            break
        except Exception:  # PyAV raises more than its own errors on a damaged file
            failures += 1
            demux = container.demux(stream)
    raise SourceUnreadable(
        f"no frame of {path} can be decoded (container {container.format.name}, codec {stream.codec_context.name})",
        hint="the file is damaged, or its codec is not supported; `ffmpeg -i FILE OUT.mp4` may repair it",
    )


def _stamp(container: str, frame: Any) -> int | None:
    ticks = frame.dts if container in WITHOUT_PTS or frame.pts is None else frame.pts
    return None if ticks is None else int(ticks)


def _origin(name: str, stream: Any, first: Any, timeline: Timeline) -> int:
    origin = _stamp(name, first) or 0
    if stream.start_time is None or name in WITHOUT_PTS:
        return origin
    stated = int(stream.start_time)
    # A start that is far from the first frame is as damaged as a gap in the middle.
    far = timeline.leaps(0.0, float((origin - stated) * stream.time_base))
    return origin if far else min(origin, stated)


def _lost_origin(name: str, container: Any, stream: Any, origin: int, whole_s: float | None) -> int:
    """Return the ticks at which a file began whose first packets are lost; its first frame's where nothing says it."""
    if name == "matroska":
        container.seek(1 << 60, backward=True)  # reads the index, which may stand at the end
        if stream.index_entries and stream.index_entries[0].timestamp < origin:
            return int(stream.index_entries[0].timestamp)
    near = 0 <= origin * stream.time_base <= min(whole_s or math.inf, LONGEST_GAP_WITHOUT_END_S)
    return 0 if near and name in FROM_ZERO else origin


def _promised_end_s(container: Any, stream: Any, whole_s: float | None) -> float | None:
    own_s = float(stream.duration * stream.time_base) if stream.duration else _tagged_s(stream)
    if own_s is not None and whole_s is not None and container.format.name.startswith("mov"):
        ends_s = [float(((one.start_time or 0) + (one.duration or 0)) * one.time_base) for one in container.streams]
        if whole_s - max(ends_s) > max(HONEST_S, HONEST_PART * whole_s):
            return whole_s  # no stream lasts as long as the movie: the clock of this one is wrong
    if own_s is not None:
        return own_s if whole_s is None else min(own_s, whole_s)
    # With other streams beside it, the whole may be longer than the video.
    return whole_s if len(container.streams) == 1 else None


def _tagged_s(stream: Any) -> float | None:
    """Return the length that a tag of Matroska states in words."""
    tag = next((value for key, value in stream.metadata.items() if key.upper() == "DURATION"), "")
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", tag)
    return int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3]) if match else None


def packets(probe: Probe, container: Any, stream: Any, from_s: float, report: DecodeReport) -> Iterator[Any]:
    """Give the packets of the video stream, from the key frame at or before `from_s` (0: from the start) to the end.

    A demultiplexer that fails in the middle of the file is asked again. At the end the report learns of packets that
    the file promised and did not hold.
    """
    if from_s > 0:
        container.seek(probe.ticks(from_s), stream=stream, backward=True, any_frame=False)
    seen, follower = Seen(), probe.follow()
    failures, strangers = 0, 0
    demux = container.demux(stream)
    while True:
        try:
            packet = next(demux)
        except StopIteration:
            break
        except Exception as error:
            if isinstance(error, IndexError):
                # A packet of a stream that appeared in the middle of the file. PyAV does not know it and drops it.
                strangers += 1
            else:
                failures += 1
            if strangers > MOST_STRANGERS or failures > MOST_DEMUX_FAILURES:
                report.failed(None, reason(error))
                break
            demux = container.demux(stream)
            continue
        if packet.size == 0:
            continue
        failures = strangers = 0
        why = follower.up_to(packet.pos) if packet.pos is not None else ""
        if why and (seen.packets or from_s <= 0):
            _note_break(probe, report, why, seen, packet)
        if packet.is_discard and seen.gap_s(probe, packet.pts) > max(LEAP_S, MOST_REORDERED / probe.rate_fps):
            # An edit list cuts beginnings and ends away. A damaged time puts a frame there.
            report.missing(1, seen.end_s, "a time stamp jumps out of the file")
        elif probe.hides(packet) and seen.gap_s(probe, packet.pts) > 0.5 / probe.rate_fps:
            # Frames that are not shown have the time of the frame before them.
            report.missing(1, seen.end_s, "a frame says that it is not shown")
        seen.note(probe, packet)
        yield packet
    broken = follower.up_to(math.inf)
    if from_s <= 0 and not probe.interlaced and follower.frames > seen.packets:
        # FFmpeg took the pieces of two frames for one, or dropped one.
        report.missing(follower.frames - seen.packets, seen.end_s, NO_FRAME)
    _check_promises(probe, stream, report, seen, broken)


@dataclass
class Seen:
    """What the packets of a reading have told so far."""

    packets: int = 0
    last_dts: int | None = None
    last_pts: int | None = None
    begin_s: float = math.inf
    last_s: float = 0.0
    last_gap_s: float = 0.0  # between the last two frames
    most_gap_s: float = 0.0  # between two frames in the order of decoding
    most_held_s: float = 0.0  # from when a frame is decoded to when it is shown
    end_s: float = 0.0

    @property
    def interval_s(self) -> float:
        """The mean distance of two frames in seconds; 0 before there are two."""
        return (self.last_s - self.begin_s) / (self.packets - 1) if self.packets > 1 else 0.0

    def gap_s(self, probe: Probe, pts: int | None) -> float:
        """Return how far this time is from that of the last packet, in seconds; 0 where one of them has none."""
        return 0.0 if self.last_pts is None or pts is None else float(abs(pts - self.last_pts) * probe.time_base)

    def note(self, probe: Probe, packet: Any) -> None:
        """Count a packet."""
        self.packets, self.last_pts = self.packets + 1, packet.pts
        if packet.dts is not None:
            gap = packet.dts - (packet.dts if self.last_dts is None else self.last_dts)
            held = packet.pts - packet.dts if packet.pts is not None and probe.has_pts else 0
            self.most_gap_s = max(self.most_gap_s, float(gap * probe.time_base))
            self.most_held_s = max(self.most_held_s, float(held * probe.time_base))
            self.last_dts = packet.dts
        ticks = packet.pts if packet.pts is not None and probe.has_pts else packet.dts
        if ticks is not None and (time_s := probe.time_s(ticks)) <= probe.timeline.limit_s:
            stated_s = float((packet.duration or 0) * probe.time_base)
            self.begin_s = min(self.begin_s, time_s)
            if time_s > self.last_s:
                self.last_gap_s, self.last_s = time_s - self.last_s, time_s
            self.end_s = max(self.end_s, time_s + (probe.timeline.duration_s(time_s, stated_s) or 0.0))


def _note_break(probe: Probe, report: DecodeReport, why: str, seen: Seen, packet: Any) -> None:
    """Count the frames that a broken place before a packet took, by the gap in the times of decoding."""
    rate = probe.rate_fps
    if not seen.packets:
        ticks, from_s = packet.pts if packet.pts is not None else packet.dts, 0.0
    else:
        ticks = packet.dts
        from_s = seen.end_s if seen.last_dts is None else probe.time_s(seen.last_dts) + 1 / rate
    now_s = from_s if ticks is None else probe.time_s(ticks)
    lost = round((now_s - from_s) * rate)
    if lost > 0 and report.start_s < now_s <= probe.timeline.limit_s:
        report.missing(lost, max(0.0, from_s), why)
    else:
        report.broken(max(0.0, from_s), why)


def skip_to_key(probe: Probe, packets: Iterator[Any], start_s: float) -> Iterator[Any]:
    """Skip to the last key frame before the first packet that is later than `start_s`.

    This replaces a seek where there is no index: FFmpeg guesses by time stamps, and lands elsewhere in a damaged file.
    If too much would have to be held, reading begins at the first key frame that is held.
    """
    held: list[Any] = []
    size = 0
    for packet in packets:
        time_s = probe.expected_s(packet)
        if packet.is_keyframe and (time_s is None or time_s <= start_s):
            held, size = [], 0
        held.append(packet)
        size += packet.size
        if size > HELD_BYTES or (time_s is not None and time_s > start_s):
            break
    yield from held
    yield from packets


def _check_promises(probe: Probe, stream: Any, report: DecodeReport, seen: Seen, broken: str) -> None:
    """Count frames that the index or the declared end of the file promises and the packets did not hold.

    `broken` says how the file is broken behind the last packet, if it is.
    """
    why = broken or "the file ends before the end that it declares"
    if probe.fault:
        report.missing(max(0, probe.frames - len(stream.index_entries)), report.start_s, probe.fault)
        report.broken(report.start_s, probe.fault)
    if seen.packets > 2 and seen.interval_s < LEAST_INTERVAL_S:
        report.damaged(report.start_s, "hardly any time passes between the frames")
    elif probe.clock != 1.0 and abs(seen.interval_s * (probe.info.rate_fps or 0.0) / probe.clock - 1.0) < HONEST_PART:
        # Two statements agree: the length, and the distance of two frames.
        report.damaged(report.start_s, f"the clock of the file is off by a factor of {probe.clock:.3g}")
    declared_s = probe.timeline.end_s or (probe.info.duration_s if probe.info.container == "flv" else 0.0) or math.inf
    if seen.packets > MOST_REORDERED and seen.most_held_s > LEAP_S + MOST_REORDERED * seen.most_gap_s:
        report.damaged(seen.last_s, "a frame is shown long after it is decoded")
    elif min(seen.last_s - declared_s, seen.last_gap_s) > LEAP_S:
        report.damaged(seen.last_s, "a frame leaps over the end that the file declares")
    rate = probe.rate_fps
    # Honest files are off by up to half a second, or two frames.
    honest_s = 0.0 if broken else max(HONEST_S, 2.0 / rate)
    if probe.indexed:
        after = probe.ticks(report.start_s) - 1 if seen.last_dts is None else seen.last_dts
        missing = sum(entry.timestamp > after for entry in stream.index_entries)
        if seen.packets == 1 and probe.frames > 2 and report.start_s <= 0:
            missing, why = probe.frames - 1, "the header lets one frame of all be shown"
        if missing:
            report.missing(missing, seen.end_s, why)
            return
        # Times that jump behind the last edit take frames out of the index. The declared end counts what an edit list
        # cuts away on purpose, but not to the second.
        honest_s = max(2.0, 0.25 * (probe.info.duration_s or 0.0))
    gap_s = (probe.info.duration_s or 0.0) - max(seen.end_s, report.start_s)
    if gap_s > honest_s and round(gap_s * rate):
        report.missing(max(1, round(gap_s * rate)), seen.end_s, why)
    elif broken:
        report.broken(seen.end_s, why)
