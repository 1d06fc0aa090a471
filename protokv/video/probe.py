"""Look into a video file: what it says of itself, and what its first frame shows.

The first frame is decoded, so that a file without a picture is refused on opening. Stream time begins at the start of
the video stream.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from protokv.errors import SourceError, SourceUnreadable
from protokv.video.container import MAX_PIXELS, comment_of, opened, reason
from protokv.video.fingerprint import fingerprint
from protokv.video.stamps import Timeline

# AVI has no presentation times. FFmpeg guesses them wrongly for reordered frames; the order of decoding holds.
WITHOUT_PTS = {"avi"}

# The header of these declares an end, apart from the times of the frames.
DECLARING = {"avi", "matroska"}

# Packets in a row that may fail before the first frame.
MOST_FAILURES = 256


@dataclass(frozen=True)
class Probe:
    """What opening a file found out. Times and ticks: `time_s = (ticks - origin) * time_base`."""

    path: Path
    container: str
    codec: str
    pixel_format: str
    width: int  # as coded for display, before rotation
    height: int
    rotation: int  # degrees counter-clockwise: 0, 90, 180, 270
    interlaced: bool
    rate_fps: float | None
    time_base: Fraction
    origin: int
    indexed: bool  # the container has an index of all packets, to compare with what was read
    promised_s: float | None  # stream time of the end that the file declares
    size_bytes: int
    fingerprint: str
    timeline: Timeline
    comment: str | None = None
    max_pixels: int = MAX_PIXELS

    @property
    def has_pts(self) -> bool:
        """Whether the container says when a frame is shown."""
        return self.container not in WITHOUT_PTS

    def time_s(self, ticks: int) -> float:
        """Return the stream time of a tick."""
        return float((ticks - self.origin) * self.time_base)

    def ticks(self, time_s: float) -> int:
        """Return the tick at or before a stream time."""
        return self.origin + int(Fraction(time_s) / self.time_base)

    def stamp(self, frame: Any) -> int | None:
        """Return the presentation ticks of a decoded frame; None if it has none."""
        return _stamp(self.container, frame)

    def expected_s(self, packet: Any) -> float | None:
        """Return the stream time of the frame that a packet should give; None if none is due or it cannot be told."""
        if packet.pts is None or packet.is_discard or not self.has_pts:
            return None
        if self.codec == "vp8" and not bytes(packet)[0] & 0x10:
            return None  # a reference frame that is never shown
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
    context = stream.codec_context
    first = _first_frame(container, stream, path)
    name = container.format.name.split(",")[0]
    base = stream.time_base
    rate = stream.average_rate
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
    if promised_s is not None and name == "matroska":
        promised_s = max(0.0, promised_s - max(0.0, float(origin * base)))  # Matroska counts from 0, not from the start
    return Probe(
        path=path,
        container=name,
        codec=context.codec.canonical_name,
        pixel_format=str(first.format.name),
        width=int(first.width),
        height=int(first.height),
        rotation=round(first.rotation / 90) % 4 * 90,
        # 0 is unknown, 1 progressive.
        interlaced=bool(first.interlaced_frame) or context.field_order > 1,
        rate_fps=float(rate) if rate else None,
        time_base=base,
        origin=origin,
        indexed=indexed,
        promised_s=promised_s,
        size_bytes=path.stat().st_size,
        fingerprint=fingerprint(path),
        timeline=timeline,
        comment=comment_of(container),
        max_pixels=max_pixels,
    )


def _first_frame(container: Any, stream: Any, path: Path) -> Any:
    demux = container.demux(stream)
    failures = 0
    while failures <= MOST_FAILURES:
        try:
            packet = next(demux)
            for frame in packet.decode():
                return frame
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


def _promised_end_s(container: Any, stream: Any, whole_s: float | None) -> float | None:
    own_s: float | None = None
    if stream.duration:
        own_s = float(stream.duration * stream.time_base)
    else:
        tag = next((value for key, value in stream.metadata.items() if key.upper() == "DURATION"), "")
        if match := re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", tag):
            own_s = int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3])
    if own_s is not None:
        return own_s if whole_s is None else min(own_s, whole_s)
    # With other streams beside it, the whole may be longer than the video.
    return whole_s if len(container.streams) == 1 else None
