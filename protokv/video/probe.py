"""What a video file says of itself, and what its first frame shows.

The origin of stream time is the start of the video stream. The first frame is decoded, so that a file from which no
picture can be had is refused on opening.

What tells one file from another by its content: small files whole, large ones by pieces spread over all of it.

Videos in files: what must be true of the path before a decoder sees it, and which decoder that is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from protokv.errors import SourceError, SourceUnreadable
from protokv.video import scale
from protokv.video.container import MAX_PIXELS, comment_of, opened, reason
from protokv.video.fingerprint import fingerprint
from protokv.video.holes import PacketLookahead, beginning_s
from protokv.video.stamps import HOLE_S, Timeline

# AVI has no presentation times: FFmpeg guesses them wrongly for reordered frames; the order of decoding holds.
WITHOUT_PTS = {"avi"}

# Their header declares an end, apart from the times of the frames.
_DECLARING = {"avi", "matroska"}


@dataclass(frozen=True)
class Probe:
    """What opening found out. Times and ticks: `time_s = (ticks - origin) * time_base`."""

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
    indexed: bool  # the container has an index of all packets, to hold what was read against
    promised_s: float | None  # stream time of the end that the file declares
    size_bytes: int
    fingerprint: str
    timeline: Timeline
    comment: str | None = None
    max_pixels: int = MAX_PIXELS
    stretched: float = 1.0  # how many times as long as `time_base` a tick is said to be: not 1 where that is damaged

    @property
    def has_pts(self) -> bool:
        """Whether the container says when a frame is shown."""
        return self.container not in WITHOUT_PTS

    def time_s(self, ticks: int) -> float:
        """Stream time of a tick."""
        return float((ticks - self.origin) * self.time_base)

    def ticks(self, time_s: float) -> int:
        """The tick at or before a stream time."""
        return self.origin + int(Fraction(time_s) / self.time_base)

    def clock(self, frame: Any) -> int | None:
        """Presentation ticks of a decoded frame."""
        ticks = frame.dts if not self.has_pts else frame.pts if frame.pts is not None else frame.dts
        return None if ticks is None else int(ticks)


def probe(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> Probe:
    """Look into the file. SourceUnreadable where no picture can be had, or one of more than `max_pixels`."""
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
    whole_s = container.duration / av.time_base if (container.duration or 0) > 0 else None
    base = _time_base(name, stream, path, whole_s)
    stretched = float(stream.time_base / base)
    rate = stream.average_rate
    indexed = _is_indexed(name, stream)
    if whole_s is not None and name in _DECLARING:
        whole_s /= stretched
    promised_s = _promised_end_s(container, stream, base, whole_s)
    # Elsewhere the end is guessed from the last time stamps, or from the bytes per second.
    end_s = promised_s if indexed or name in _DECLARING else None
    if end_s is not None and name == "matroska" and whole_s is not None:
        end_s = max(end_s, whole_s)  # a copied tag of the stream may say less
    timeline = Timeline(end_s)
    origin = _origin(name, container, stream, first, base, timeline)
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
        rate_fps=(float(rate) * (stretched if name in WITHOUT_PTS else 1)) if rate else None,
        time_base=base,
        origin=origin,
        indexed=indexed,
        promised_s=promised_s,
        size_bytes=path.stat().st_size,
        fingerprint=fingerprint(path),
        timeline=timeline,
        comment=comment_of(container),
        max_pixels=max_pixels,
        stretched=stretched,
    )


def _time_base(name: str, stream: Any, path: Path, whole_s: float | None) -> Fraction:
    stated: Fraction = stream.time_base
    if name == "matroska":
        return scale.of_matroska(stated, whole_s, _tag_s(stream.metadata))
    if name == "avi":
        with path.open("rb") as file:
            return scale.of_avi(stated, file.read(scale.AVI_HEAD_BYTES))
    if _is_indexed(name, stream):
        with path.open("rb") as file:
            return scale.of_mp4(stated, _Ticks(stream.index_entries), scale.movie_s(file))
    return stated


class _Ticks(Sequence[int]):
    """Those of the entries of an index that are shown, looked up one by one: there may be millions."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries
        # What only leads up to the first frame of an edit comes first.
        self._first = next((i for i in range(len(entries)) if not entries[i].is_discard), 0)

    def __len__(self) -> int:
        return len(self._entries) - self._first

    def __getitem__(self, i: Any) -> Any:
        return self._entries[self._first + i].timestamp


def _origin(name: str, container: Any, stream: Any, first: Any, base: Fraction, timeline: Timeline) -> int:
    ticks = first.dts if name in WITHOUT_PTS else first.pts if first.pts is not None else first.dts
    origin = int(ticks or 0)
    if stream.start_time is None or name in WITHOUT_PTS:
        return origin
    stated = int(stream.start_time)
    # A start that is far from the first frame is as damaged as a gap in the middle.
    if not timeline.leaps(0.0, float((origin - stated) * base)):
        origin = min(origin, stated)
    if origin * base <= HOLE_S:
        return origin
    first_s, step_s = float(origin * base), min(HOLE_S, float(1 / (stream.average_rate or 25)))
    ahead = PacketLookahead(
        container.demux(stream), lambda packet: None if packet.pts is None else float(packet.pts * base)
    )
    try:
        begin_s = beginning_s(first_s, ahead.times(), step_s)
    except Exception:  # PyAV raises more than its own errors; reading goes on behind them
        return origin
    return origin if begin_s == first_s else round(begin_s / base)


def _first_frame(container: Any, stream: Any, path: Path) -> Any:
    demux = container.demux(stream)
    failures = 0
    while failures <= 256:
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


def _is_indexed(name: str, stream: Any) -> bool:
    # `frames` is 0 for fragmented files, whose index grows while they are read.
    return name == "mov" and bool(stream.frames) and len(stream.index_entries) > 0


def _promised_end_s(container: Any, stream: Any, base: Fraction, whole: float | None) -> float | None:
    own: float | None = None
    if stream.duration:
        own = float(stream.duration * base)
    elif (tag := _tag_s(stream.metadata)) is not None:
        own = tag
    if own is not None:
        return own if whole is None else min(own, whole)
    # With other streams beside it, the whole may be longer than the video.
    return whole if len(container.streams) == 1 else None


def _tag_s(metadata: dict[str, str]) -> float | None:
    tag = next((value for key, value in metadata.items() if key.upper() == "DURATION"), "")
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", tag)
    return int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3]) if match else None
