"""PyAV: open a video file with limits on its demultiplexer and decoder, describe it, and convert its frames.

FFmpeg gets an open descriptor and no name, speaks no protocol that takes one, and may use only the formats of
`FORMATS`. So it reads the one file, whatever the file and its name say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import av
import numpy as np

from protokv.errors import SourceUnreadable
from protokv.video.source import Image, SourceInfo

# The demultiplexers that files may be read with, by content. None makes pictures of text or opens another file, as
# those of playlists, scripts, sequences of images, MLV and VobSub do.
# fmt: off
FORMATS = frozenset((
    "mov", "matroska", "avi", "mpegts", "mpeg", "flv", "live_flv", "kux", "ogg", "asf", "rm", "wtv", "nut", "mxf",
    "gxf", "dv", "nsv", "nuv", "pva", "swf", "dhav", "lxf", "ivf", "ty", "film_cpk", "yuv4mpegpipe", "gif", "apng",
    "ser", "cine",
    "h261", "h263", "h264", "hevc", "vvc", "evc", "m4v", "mpegvideo", "mjpeg", "mpjpeg", "smjpeg", "mxg", "vc1",
    "vc1test", "av1", "obu", "dirac", "dnxhd", "cavsvideo", "avs2", "avs3",
    "jpeg_pipe", "png_pipe", "webp_pipe", "bmp_pipe", "tiff_pipe",
    # Without pictures; named so that the error says what they are, and for the sound of HLS.
    "aac", "ac3", "eac3", "flac", "mp3", "wav",
))
# fmt: on

# These decoders show old memory where a frame is cut short, unless they are told to refuse such frames; and where this
# mark is missing, after which the pixels come.
SHOWING_MEMORY = {"mjpeg": b"\xff\xda"}

# 8K in whole blocks. Decoders hold up to 17 frames, so this bounds the memory that a small file can make them take.
MAX_PIXELS = 8192 * 4352


# AVDISCARD_ALL
DISCARD_ALL = 48


@contextmanager
def open_container(path: Path, max_pixels: int = MAX_PIXELS) -> Iterator[tuple[Any, Any]]:
    """Open a file; give PyAV's container and its video stream, and close them afterwards.

    Raises:
        SourceUnreadable: it is no video file, or its frames have more than `max_pixels`.
    """
    try:
        container = _open(path, {"format_whitelist": ",".join(sorted(FORMATS)), "max_pixels": str(max_pixels)})
    except av.error.ArgumentError as error:
        raise SourceUnreadable(
            f"expected a video file, {path} has a format that is not read: text, a playlist or a list of files",
            hint="name the video file itself",
        ) from error
    except Exception as error:
        raise SourceUnreadable(
            f"expected a video file, cannot open {path}: {explain_error(error)}",
            hint="check that the file was copied or recorded to its end; `ffprobe FILE` shows what is in it",
        ) from error
    with container:
        stream = _video_stream(container, path)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > max_pixels:
            raise refuse_size(path, width, height, max_pixels)
        limit_decoder(stream.codec_context, max_pixels)
        yield container, stream


def discard_others(container: Any, stream: Any) -> None:
    """Let the demultiplexer leave out the packets of all other streams. Older PyAV reads and drops them."""
    for other in container.streams:
        if other is not stream:
            with suppress(AttributeError):
                other.discard = DISCARD_ALL


def _open(path: Path, options: dict[str, str]) -> Any:
    # Tags in another encoding than UTF-8 are no reason to refuse a file.
    more: dict[str, Any] = {"mode": "r", "metadata_errors": "surrogateescape"}
    if os.name != "posix":
        return av.open(f"file:{path}", options={**options, "protocol_whitelist": "file"}, **more)
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # FFmpeg duplicates it
    try:
        return av.open("fd:", options={**options, "protocol_whitelist": "fd", "fd": str(number)}, **more)
    finally:
        os.close(number)


def limit_decoder(context: Any, max_pixels: int) -> None:
    """Let a decoder refuse frames that are too large before it allocates them, and frames that it would make up.

    One thread gives the same bytes every time; several may conceal damage in another order.
    """
    checks = {"max_pixels": str(max_pixels)}
    if context.name in SHOWING_MEMORY:
        checks["err_detect"] = "explode"
    context.thread_count = 1
    context.options = checks


def refuse_size(name: object, width: int, height: int, max_pixels: int) -> SourceUnreadable:
    """Return the error for frames of more than `max_pixels`."""
    return SourceUnreadable(
        f"the frames of {name} have {width} x {height} pixels, more than the limit of {max_pixels}",
        hint=f"if you trust it, allow that with --max-frame-pixels {width * height}, or scale it down",
    )


def explain_error(error: BaseException) -> str:
    """Return an error in one line, without numbers and paths if FFmpeg or the system has words for it."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def _video_stream(container: Any, path: Path) -> Any:
    attached = av.stream.Disposition.attached_pic
    for stream in container.streams.video:
        if not stream.disposition & attached and stream.codec_context is not None:
            return stream
    kinds = sorted({str(stream.type) for stream in container.streams}) or ["nothing"]
    raise SourceUnreadable(
        f"expected a video stream in {path}, found {', '.join(kinds)}", hint="name a file that has pictures"
    )


def describe_stream(name: str, kind: str, container: Any, stream: Any, first: Any) -> SourceInfo:
    """Return the facts that PyAV's container, its video stream and its first frame tell of a source."""
    rotation = round(first.rotation / 90) % 4 * 90
    across = rotation in (90, 270)
    return SourceInfo(
        name=name,
        kind=kind,
        decoder="pyav",
        container=container.format.name.split(",")[0],
        codec=stream.codec_context.codec.canonical_name,
        pixel_format=str(first.format.name),
        width=int(first.height if across else first.width),
        height=int(first.width if across else first.height),
        rotation=rotation,
        rate_fps=float(stream.average_rate) if stream.average_rate else None,
    )


def convert_to_rgb(frame: Any, info: SourceInfo) -> Image:
    """Return a decoded frame as RGB `[h, w, 3]` uint8 in the size and rotation of the source.

    A stream may change its size on the way; all its frames get one size.
    """
    across = info.rotation in (90, 270)
    width, height = (info.height, info.width) if across else (info.width, info.height)
    same = (frame.width, frame.height) == (width, height)
    fitted = frame if same else frame.reformat(width=width, height=height)
    image: Image = fitted.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(image, info.rotation // 90)) if info.rotation else image
