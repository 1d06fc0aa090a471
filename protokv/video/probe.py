"""Look into a video file: its header and its first frame, as PyAV tells them.

`probe_file` decodes the first frame, so that a file without a picture is refused on opening. Stream time begins at the
start of the video stream.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from protokv.errors import SourceError, SourceUnreadable
from protokv.video.container import MAX_PIXELS, describe_stream, explain_error, open_container
from protokv.video.file import fingerprint
from protokv.video.source import SourceInfo, TextTrack
from protokv.video.stamps import Timeline
from protokv.video.text_tracks import find_text_tracks

# AVI has no presentation times. FFmpeg guesses them wrongly for reordered frames; the order of decoding holds.
WITHOUT_PTS = {"avi"}

# The header of these declares an end, apart from the times of the frames.
DECLARING = {"avi", "matroska"}

# The length that these state is counted from 0, and not from their first frame.
COUNTING_FROM_ZERO = {"matroska", "avi", "flv", "nut"}

# Packets in a row that may fail before the first frame.
MOST_FAILURES = 256


@dataclass(frozen=True)
class Probe:
    """The facts of a file from its header and its first frame; `time_s = (ticks - origin) * time_base`."""

    path: Path
    info: SourceInfo  # `duration_s` is the stream time of the end that the file declares
    interlaced: bool
    time_base: Fraction
    origin: int
    indexed: bool  # the container has an index of all packets, to compare with the packets that were read
    timeline: Timeline
    max_pixels: int = MAX_PIXELS
    texts: tuple[TextTrack, ...] = ()

    @property
    def has_pts(self) -> bool:
        """True if the container has presentation times."""
        return self.info.container not in WITHOUT_PTS

    @property
    def interval_s(self) -> float:
        """The usual distance of two frames."""
        return 1 / (self.info.rate_fps or 25.0)

    def time_s(self, ticks: int) -> float:
        """Return the stream time of a tick."""
        return float((ticks - self.origin) * self.time_base)

    def ticks(self, time_s: float) -> int:
        """Return the tick at or before a stream time."""
        return self.origin + int(Fraction(time_s) / self.time_base)

    def stamp(self, frame: Any) -> int | None:
        """Return the presentation ticks of a decoded frame; None if it has none."""
        return _stamp(self.info.container, frame)

    def expected_s(self, packet: Any) -> float | None:
        """Return the stream time of the frame that a packet should give; None if none is due or it is unknown."""
        if packet.pts is None or packet.is_discard or not self.has_pts:
            return None
        # VP8 has reference frames that are never shown; key frames are.
        hidden = self.info.codec == "vp8" and bytes(packet)[0] & 0x11 == 1
        return None if hidden else self.time_s(packet.pts)


def probe_file(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> Probe:
    """Look into a file.

    Raises:
        SourceUnreadable: no picture can be had, or one of more than `max_pixels`.
    """
    path = Path(path)
    with open_container(path, max_pixels) as (container, stream):
        try:
            return _probe(path, container, stream, max_pixels)
        except SourceError:
            raise
        except Exception as error:
            raise SourceUnreadable(
                f"{path} cannot be read as a video: {explain_error(error)}", hint="the file is damaged; copy it again"
            ) from error


def _probe(path: Path, container: Any, stream: Any, max_pixels: int) -> Probe:
    first = _first_frame(container, stream, path)
    info = describe_stream(path.name, "file", container, stream, first)
    name = info.container
    # `frames` is 0 for fragmented files, whose index grows while they are read.
    indexed = name == "mov" and bool(stream.frames) and len(stream.index_entries) > 0
    whole_s = container.duration / av.time_base if (container.duration or 0) > 0 else None
    stated_s = _stated_length_s(container, stream, whole_s)
    # Elsewhere the end is guessed from the last time stamps, or from the bytes per second.
    end_s = stated_s if indexed or name in DECLARING else None
    if end_s is not None and whole_s is not None and name == "matroska":
        end_s = max(end_s, whole_s)  # a copied tag of the stream may say less
    timeline = Timeline(end_s)
    origin = _origin(name, stream, first, timeline)
    late_s = max(0.0, float(origin * stream.time_base))
    if stated_s is not None and name in COUNTING_FROM_ZERO and (name == "matroska" or late_s < stated_s):
        stated_s = max(0.0, stated_s - late_s)  # FLV may count from the start
    return Probe(
        path=path,
        info=replace(info, duration_s=stated_s, size_bytes=path.stat().st_size, fingerprint=fingerprint(path)),
        # 0 is unknown, 1 progressive.
        interlaced=bool(first.interlaced_frame) or stream.codec_context.field_order > 1,
        time_base=stream.time_base,
        origin=origin,
        indexed=indexed,
        timeline=timeline,
        max_pixels=max_pixels,
        texts=find_text_tracks(container),
    )


def _first_frame(container: Any, stream: Any, path: Path) -> Any:
    """Return the first frame that can be decoded."""
    demux, failures = container.demux(stream), 0
    while failures <= MOST_FAILURES:
        try:
            for frame in next(demux).decode():
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


def _stated_length_s(container: Any, stream: Any, whole_s: float | None) -> float | None:
    """Return the length of the pictures, as the stream, a tag of Matroska in words, or the container states it."""
    own_s = float(stream.duration * stream.time_base) if stream.duration else None
    tag = next((value for key, value in stream.metadata.items() if key.upper() == "DURATION"), "")
    if own_s is None and (match := re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", tag)):
        own_s = int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3])
    if own_s is not None:
        return own_s if whole_s is None else min(own_s, whole_s)
    # With other streams, the whole may be longer than the video.
    return whole_s if len(container.streams) == 1 else None
