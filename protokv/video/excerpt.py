"""Pictures and clips out of a video file: single frames with Pillow, some seconds as an MP4 with PyAV.

The pictures of a clip are encoded anew, because a copy could begin at a key frame only, which may be many seconds off.
Its sound is copied as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from protokv.errors import SourceUnreadable
from protokv.video.container import opened, reason
from protokv.video.source import Source

# The first that PyAV was built with; its wheels have both.
ENCODERS = {"libx264": {"preset": "veryfast", "crf": "20"}, "mpeg4": {"qscale:v": "3"}}

# Sound that an MP4 can hold.
SOUND = {"aac", "ac3", "alac", "eac3", "flac", "mp3", "opus"}

TICKS = Fraction(1, 90_000)


def write_frame(source: Source, time_s: float, path: Path) -> None:
    """Write the frame that is shown at a time, as PNG or JPEG by the suffix of the path.

    Raises:
        SourceError: there is none, or it cannot be read.
        OSError: the file cannot be written.
    """
    frame = next(iter(source.frames(time_s)), None)
    if frame is None:
        raise SourceUnreadable(f"{source.info.name} has no frame at {time_s:g} s")
    Image.fromarray(frame.image).save(path)


def write_clip(source: Source, path: Path, start_s: float, end_s: float, target: Path) -> str:
    """Write some seconds of a file as MP4; the target is replaced whole or not at all.

    Args:
        source: the file, opened; it gives the pictures.
        path: the file; it gives the sound.
        start_s: time in the file at which the clip begins.
        end_s: time in the file at which it ends.
        target: where the clip goes.

    Returns:
        How it was made, in words: `libx264, with its sound`.

    Raises:
        SourceError: there is no frame, or it cannot be read.
        OSError: the target cannot be written.
    """
    encoder = next(one for one in ENCODERS if one in av.codecs_available)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with av.open(str(unfinished), "w", format="mp4") as clip, opened(path) as (container, _):
            audio = next((one for one in container.streams.audio if one.codec_context.name in SOUND), None)
            rate = Fraction(source.info.rate_fps or 25).limit_denominator(1000)
            video = clip.add_stream(encoder, rate=rate, options=ENCODERS[encoder])
            sound = None if audio is None else clip.add_stream_from_template(audio)
            packets = _encode(source, video, start_s, end_s)
            packets += _copied(container, audio, sound, start_s, end_s) if audio is not None else ()
            # A player wants the sound beside its pictures, not behind all of them.
            for packet in sorted(packets, key=lambda one: one.dts * one.time_base):
                clip.mux(packet)
        unfinished.replace(target)
    except av.error.FFmpegError as error:
        raise SourceUnreadable(f"cannot cut {path}: {reason(error)}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return f"{encoder}, with its sound" if audio is not None else f"{encoder}, without sound"


def _encode(source: Source, video: Any, start_s: float, end_s: float) -> list[Any]:
    video.pix_fmt, video.codec_context.time_base = "yuv420p", TICKS
    packets: list[Any] = []
    for frame in source.frames(start_s):
        if frame.time_s >= end_s:
            break
        # The encoders want even numbers of rows and columns.
        image = frame.image[: frame.image.shape[0] & ~1, : frame.image.shape[1] & ~1]
        if not packets and not video.codec_context.is_open:
            video.height, video.width = image.shape[:2]
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        picture.pts, picture.time_base = round(max(0.0, frame.time_s - start_s) / TICKS), TICKS
        packets += video.encode(picture)
    if not video.codec_context.is_open:
        raise SourceUnreadable(f"{source.info.name} has no frame at {start_s:g} s")
    return packets + list(video.encode())


def _copied(container: Any, audio: Any, sound: Any, start_s: float, end_s: float) -> Iterable[Any]:
    """Give the packets of the sound from `start_s` to `end_s`, at times of the clip."""
    first_s = _beginning_s(container)
    container.seek(int((start_s + first_s) * av.time_base))
    for packet in container.demux(audio):
        if packet.dts is None or packet.pts is None:
            continue
        time_s = float(packet.pts * packet.time_base) - first_s
        if time_s >= end_s:
            return
        if time_s >= start_s:
            shift = round((start_s + first_s) / packet.time_base)
            packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, sound
            yield packet


def _beginning_s(container: Any) -> float:
    """Return the time stamp at which the pictures begin, which is time 0 of the source."""
    stream = container.streams.video[0]
    return float((stream.start_time or 0) * stream.time_base)
