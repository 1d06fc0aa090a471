"""PyAV: open a video file with limits on its demultiplexer and decoder, describe it, and convert its frames.

FFmpeg gets an open descriptor and no name, speaks no protocol that takes one, and may use only the formats of
`FORMATS`. So it reads the one file, whatever the file and its name say.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
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

# AV_DISPOSITION: a picture of the whole file; thumbnails at times; a tile of a picture; a picture beside a track.
_ATTACHED, _THUMBNAILS, _TILE, _STILL = 1 << 10, 1 << 11, 1 << 19, 1 << 20

# Codecs of covers, in containers that do not count their frames.
_PICTURES = {"mjpeg", "png", "apng", "webp", "bmp", "gif", "tiff", "jpegls", "jpeg2000"}

# Pixels that are wider, or higher, than this are a damaged header.
_WIDEST_PIXEL = 8


@contextmanager
def open_container(path: Path, max_pixels: int = MAX_PIXELS) -> Iterator[tuple[Any, Any, list[str]]]:
    """Open a file; give PyAV's container, its video stream and notes on its choice, and close it afterwards.

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
        stream, notes = choose_stream(container, path)
        limit_decoder(stream.codec_context, max_pixels, path)
        yield container, stream, notes


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


def limit_decoder(context: Any, max_pixels: int, name: object) -> None:
    """Let a decoder refuse frames that are too large before it allocates them, and frames that it would make up.

    One thread gives the same bytes every time; several may conceal damage in another order.

    Raises:
        SourceUnreadable: all frames are too large.
    """
    if context.width * context.height > max_pixels:
        raise refuse_size(name, context.width, context.height, max_pixels)
    checks = {"max_pixels": str(max_pixels)}
    if context.name in SHOWING_MEMORY:
        checks["err_detect"] = "explode"
    context.thread_count = 1
    context.options = checks


def refuse_size(name: object, width: int, height: int, max_pixels: int) -> SourceUnreadable:
    """Return the error for frames of more than `max_pixels`."""
    # Decoders fill whole blocks.
    pixels = -(-width // 64) * 64 * -(-height // 32) * 32
    return SourceUnreadable(
        f"the frames of {name} have {width} x {height} pixels, more than the limit of {max_pixels}",
        hint=f"if you trust it, allow that with --max-frame-pixels {pixels}, or scale it down",
    )


def refuse_encrypted(name: object, context: Any, first: Any) -> None:
    """Refuse a stream whose first packet is encrypted: decoders make noise of it. SourceUnreadable."""
    if context.codec_tag in ("encv", "drmi") or (first is not None and first.has_sidedata("encryption_info")):
        raise SourceUnreadable(
            f"{name} is encrypted: it has digital rights management", hint="name a copy that is not encrypted"
        )


def refuse_undecodable(name: object, container: Any, stream: Any, first: Any, max_pixels: int) -> SourceUnreadable:
    """Return the error for a stream without one frame that can be decoded. `first` is its first packet, if any came."""
    context, said = stream.codec_context, ""
    if first is not None:
        # Decoders say only to FFmpeg's log that a picture is too large.
        before = av.logging.get_level()
        av.logging.set_level(av.logging.ERROR)
        av.logging.set_skip_repeated(False)
        try:
            with av.logging.Capture() as logs, suppress(Exception):
                afresh = av.CodecContext.create(context.codec.name, "r")
                afresh.extradata, afresh.options = context.extradata, {"max_pixels": str(max_pixels)}
                afresh.decode(first)
            said = " ".join(text for _, _, text in logs)
        finally:
            av.logging.set_skip_repeated(True)
            av.logging.set_level(before)
    if large := re.search(r"Picture size (\d+)x(\d+) exceeds", said):
        return refuse_size(name, int(large[1]), int(large[2]), max_pixels)
    return SourceUnreadable(
        f"no frame of {name} can be decoded (container {container.format.name}, codec {context.name})",
        hint="the file is damaged, or its codec is not supported; `ffmpeg -i FILE OUT.mp4` may repair it",
    )


def explain_error(error: BaseException) -> str:
    """Return an error in one line, without numbers and paths if FFmpeg or the system has words for it."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def choose_stream(container: Any, name: object) -> tuple[Any, list[str]]:
    """Return the video stream that players show, and what a user should know about the choice.

    That is the default track, then the one with the most pixels, then FFmpeg's best one. Covers come last, also those
    that are marked as tracks.

    Raises:
        SourceUnreadable: there are no pictures, or one that is kept in tiles.
    """
    streams = [one for one in container.streams.video if one.codec_context is not None]
    if any(one.disposition & _TILE for one in streams):
        raise SourceUnreadable(
            f"{name} is a picture in tiles (a grid of HEIC or AVIF), and tiles are not put together",
            hint="convert it: `heif-dec IN.heic OUT.png`, or `magick IN.avif OUT.png`",
        )
    streams = [one for one in streams if not one.disposition & _ATTACHED]
    if not streams:
        kinds = sorted({str(one.type) for one in container.streams}) or ["nothing"]
        raise SourceUnreadable(
            f"expected a video stream in {name}, found {', '.join(kinds)}", hint="name a file that has pictures"
        )
    if len(streams) == 1:
        return streams[0], []
    best = container.streams.best("video")

    def rank(one: Any) -> tuple[bool, bool, int, bool]:
        cover = one.frames == 1 or bool(one.disposition & (_THUMBNAILS | _STILL))
        cover = cover or (not one.frames and one.codec_context.name in _PICTURES)
        context = one.codec_context
        return not cover, bool(one.disposition & 1), (context.width or 0) * (context.height or 0), one is best

    stream = max(streams, key=rank)
    shape = f"{stream.codec_context.width} x {stream.codec_context.height}"
    return stream, [f"{len(streams)} video tracks: track {stream.index} of {shape} pixels is watched"]


def describe_stream(name: str, kind: str, container: Any, stream: Any, first: Any) -> tuple[SourceInfo, list[str]]:
    """Return the facts that PyAV's container, its video stream and its first frame tell of a source, and notes."""
    rotation, mirrored, degrees = read_orientation(first)
    width, height = _shown_size(first.width, first.height, stream.sample_aspect_ratio)
    if rotation in (90, 270):
        width, height = height, width
    info = SourceInfo(
        name=name,
        kind=kind,
        decoder="pyav",
        container=container.format.name.split(",")[0],
        codec=stream.codec_context.codec.canonical_name,
        pixel_format=str(first.format.name),
        width=width,
        height=height,
        rotation=rotation,
        mirrored=mirrored,
        rate_fps=float(stream.average_rate) if stream.average_rate else None,
    )
    odd = f"it asks to be turned by {degrees:g} degrees: pictures are turned by quarters only"
    return info, [odd] if degrees % 90 else []


def read_orientation(frame: Any) -> tuple[int, bool, int]:
    """Return how a frame asks to be shown, by its display matrix.

    Returns:
        Degrees counter-clockwise (0, 90, 180, 270), whether it is mirrored left to right before that, and the degrees
        clockwise that it asks for.
    """
    data = next((bytes(one) for one in frame.side_data if one.type.name == "DISPLAYMATRIX"), b"")
    # A point (x, y) goes to (a x + c y, b x + d y).
    a, b, _, c, d = struct.unpack("=5i", data[:20]) if len(data) >= 20 else (1, 0, 0, 0, 1)
    across = abs(b) + abs(c) > abs(a) + abs(d)
    mirrored = (b > 0) == (c > 0) if across else (a < 0) != (d < 0)
    turned = (c < 0) if across else (d < 0)
    # A mirror reverses the sense of the angle.
    degrees = round(math.degrees(math.atan2(b, -a if mirrored else a))) % 360 if a or b else 0
    return 90 * (2 * turned + across), mirrored, degrees


def _shown_size(width: int, height: int, pixel: Fraction | None) -> tuple[int, int]:
    """Return the size of a picture with square pixels: one side grows, as in browsers; above 8K, the other shrinks."""
    if not pixel or not 1 / _WIDEST_PIXEL <= pixel <= _WIDEST_PIXEL:
        return width, height
    if width * height * max(pixel, 1 / pixel) > MAX_PIXELS:
        return (width, round(height / pixel)) if pixel > 1 else (round(width * pixel), height)
    return (round(width * pixel), height) if pixel > 1 else (width, round(height / pixel))


def convert_to_rgb(frame: Any, info: SourceInfo) -> Image:
    """Return a decoded frame as RGB `[h, w, 3]` uint8 in the shape and orientation of the source.

    A stream may change its size on the way; all its frames get one size.
    """
    width, height = (info.height, info.width) if info.rotation in (90, 270) else (info.width, info.height)
    image: Image = frame.to_ndarray(format="rgb24", width=width, height=height)
    if info.mirrored:
        image = image[:, ::-1]
    return np.ascontiguousarray(np.rot90(image, info.rotation // 90))
