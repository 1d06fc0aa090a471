"""PyAV: open a video file with limits on its demultiplexer and decoder, describe it, and convert its frames.

FFmpeg may read only the named file: no network, no playlists, no other files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np

from protokv.errors import SourceUnreadable
from protokv.video.source import Image, SourceInfo

# Demultiplexers that make pictures of text, or open other files than the named one.
REFUSED = {"tty", "bin", "xbin", "adf", "idf", "hls", "concat", "dash", "sdp", "rtsp", "imf", "ffmetadata"}

# These decoders show old memory where a frame is cut short, unless they are told to refuse such frames.
SHOWING_MEMORY = {"mjpeg"}

# 8K in whole blocks. Decoders hold up to 17 frames, so this bounds the memory that a small file can make them take.
MAX_PIXELS = 8192 * 4352


@contextmanager
def opened(path: Path, max_pixels: int = MAX_PIXELS) -> Iterator[tuple[Any, Any]]:
    """Open a file; give PyAV's container and its video stream, and close them afterwards.

    Raises:
        SourceUnreadable: it is no video file, or its frames have more than `max_pixels`.
    """
    options = {"protocol_whitelist": "file", "max_pixels": str(max_pixels)}
    try:
        # Tags in another encoding than UTF-8 are no reason to refuse a file.
        container = av.open("file:" + str(path), options=options, metadata_errors="surrogateescape")
    except Exception as error:
        raise SourceUnreadable(
            f"expected a video file, cannot open {path}: {reason(error)}",
            hint="check that the file was copied or recorded to its end; `ffprobe FILE` shows what is in it",
        ) from error
    with container:
        if container.format.name.split(",")[0] in REFUSED:
            raise SourceUnreadable(
                f"expected a video file, {path} is text or a playlist ({container.format.name})",
                hint="name the video file itself",
            )
        stream = _video_stream(container, path)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > max_pixels:
            raise too_large(path, width, height, max_pixels)
        limit_decoder(stream.codec_context, max_pixels)
        yield container, stream


def limit_decoder(context: Any, max_pixels: int) -> None:
    """Let a decoder refuse frames that are too large before it allocates them, and frames that it would make up.

    One thread gives the same bytes every time; several may conceal damage in another order.
    """
    checks = {"max_pixels": str(max_pixels)}
    if context.name in SHOWING_MEMORY:
        checks["err_detect"] = "explode"
    context.thread_count = 1
    context.options = checks


def too_large(name: object, width: int, height: int, max_pixels: int) -> SourceUnreadable:
    """Return the error for frames of more than `max_pixels`."""
    return SourceUnreadable(
        f"the frames of {name} have {width} x {height} pixels, more than the limit of {max_pixels}",
        hint=f"if you trust it, allow that with --max-frame-pixels {width * height}, or scale it down",
    )


def reason(error: BaseException) -> str:
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


def describe(name: str, kind: str, container: Any, stream: Any, first: Any) -> SourceInfo:
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


def to_rgb(frame: Any, info: SourceInfo) -> Image:
    """Return a decoded frame as RGB `[h, w, 3]` uint8 in the size and rotation of the source.

    A stream may change its size on the way; all its frames get one size.
    """
    across = info.rotation in (90, 270)
    width, height = (info.height, info.width) if across else (info.width, info.height)
    same = (frame.width, frame.height) == (width, height)
    fitted = frame if same else frame.reformat(width=width, height=height)
    image: Image = fitted.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(image, info.rotation // 90)) if info.rotation else image
