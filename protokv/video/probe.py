"""A look at the beginning of a video: which stream is watched, its shape, and how it counts its
times.

Stream time begins where the container begins, as in players: at its first picture or sound. So
pictures, words and evidence have one origin.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from PIL import ExifTags, Image

from protokv.errors import SourceUnreadable
from protokv.video.clock import (
    LONGEST_GAP_S,
    LONGEST_PAUSE_S,
    PacketTiming,
    bound_declared_end,
)
from protokv.video.container import MAX_FRAME_PIXELS, make_mp4_index_error
from protokv.video.joined import identify_stream
from protokv.video.source import Image as Picture
from protokv.video.source import SourceInfo

# AV_DISPOSITION: a picture of the whole file; thumbnails at times; a tile of a picture; a picture
# beside a track.
_ATTACHED = 1 << 10
_THUMBNAILS = 1 << 11
_TILE = 1 << 19
_STILL = 1 << 20

# Codecs of covers, in containers that do not count their frames.
_PICTURES = {"mjpeg", "png", "apng", "webp", "bmp", "gif", "tiff", "jpegls", "jpeg2000"}

# Pixels that are wider, or higher, than this are a damaged header.
_WIDEST_PIXEL = 8

# Decoders that show old memory for the missing part of a frame, unless they are told to refuse such
# a frame. The mark stands before the pixels; a packet without it has none.
STALE_MEMORY_DECODERS = {"mjpeg": b"\xff\xda"}

# Packets that may fail, and bytes that are read, before the first frame.
_MOST_FAILURES = 256
_MOST_BYTES = 256 << 20

# These have no presentation times. FFmpeg guesses them wrongly for reordered frames; the order of
# decoding holds.
_WITHOUT_PTS = {"avi", "asf"}

# Containers whose header declares an end apart from the times of the frames.
_DECLARING = {"avi", "matroska"}

# Containers that count their length from time 0, although their first frame may be later.
_COUNTING_FROM_ZERO = {"matroska", "avi", "flv", "nut"}

# These state one too, but a live recording goes on behind it.
_STATING = {"flv", "asf"}

# The fewest bytes a second of any video, slides of 90 minutes included. Stamps that say less jump.
_FEWEST_BYTES = 0.25

# EXIF's numbers of the orientations that are mirrored
_MIRRORED = {2, 4, 5, 7}

# AVColorTransferCharacteristic: BT.2020 of 10 and 12 bits, PQ, HLG; and that of ordinary screens.
_WIDE = {14, 15, 16, 18}
_BT709 = 1

# No camera gives more frames a second.
_MOST_FPS = 1000

# AVFMT_NOTIMESTAMPS, of raw streams
_NOTIMESTAMPS = 1 << 7


def choose_video_stream(
    container: Any, name: object, max_pixels: int, known: Collection[tuple[int, str]] = ()
) -> tuple[Any, list[str]]:
    """Return the video stream that players show, its decoder limited, and what a user should know
    about the choice; none of those that are `known` by their PID and codec.

    That is the default track, then the one with the most pixels, then FFmpeg's best one. Covers
    come last, also those that are marked as tracks. The decoder refuses frames that are too large
    before it allocates them. It has one thread: several may conceal damage in another order every
    time. SourceUnreadable: there are no pictures, or one that is kept in tiles; or all frames are
    too large.
    """
    streams = [one for one in container.streams.video if one.codec_context is not None]
    if any(one.disposition & _TILE for one in streams):
        raise SourceUnreadable(
            f"{name} is a picture in tiles (a grid of HEIC or AVIF), and tiles are not put "
            "together",
            hint="convert it: `heif-dec IN.heic OUT.png`, or `magick IN.avif OUT.png`",
        )
    streams = [
        one
        for one in streams
        if not one.disposition & _ATTACHED and identify_stream(one) not in known
    ]
    if not streams:
        kinds = sorted({str(one.type) for one in container.streams}) or ["nothing"]
        raise SourceUnreadable(
            f"expected a video stream in {name}, found {', '.join(kinds)}",
            hint="name a file that has pictures",
        )
    best = container.streams.best("video")

    def rank(one: Any) -> tuple[bool, bool, int, bool]:
        cover = one.frames == 1 or bool(one.disposition & (_THUMBNAILS | _STILL))
        cover = cover or (not one.frames and one.codec_context.name in _PICTURES)
        context = one.codec_context
        return (
            not cover,
            bool(one.disposition & 1),
            (context.width or 0) * (context.height or 0),
            one is best,
        )

    stream = max(streams, key=rank)
    context = stream.codec_context
    width = context.width
    height = context.height
    if width * height > max_pixels:
        # Decoders fill whole blocks.
        pixels = -(-width // 64) * 64 * -(-height // 32) * 32
        raise SourceUnreadable(
            f"the frames of {name} have {width} x {height} pixels, more than the limit of "
            f"{max_pixels}",
            hint=f"if you trust it, allow that with --max-frame-pixels {pixels}, or scale it down",
        )
    context.thread_count = 1
    checks = {"err_detect": "explode"} if context.name in STALE_MEMORY_DECODERS else {}
    context.options = {"max_pixels": str(max_pixels), **checks}
    note = (
        f"{len(streams)} video tracks: track {stream.index} of {width} x {height} pixels is watched"
    )
    return stream, [note] if len(streams) > 1 else []


class StreamProbe(NamedTuple):
    """The findings of a look at the beginning of a stream."""

    info: SourceInfo
    timing: PacketTiming
    indexed: bool  # the container has an index of all packets, to compare with those that were read
    plain: bool  # progressive, and shown in the shape in which it is decoded
    notes: list[str]
    packets: Iterator[Any]  # all of them, from the first one on


def probe_stream(
    name: str,
    kind: str,
    container: Any,
    stream: Any,
    packets: Iterator[Any],
) -> StreamProbe:
    """Decode the first frame of PyAV's video stream, so that one without a picture is refused.

    SourceUnreadable: no picture can be had, or it is encrypted.
    """
    context = stream.codec_context
    first = None
    failures = 0
    size = 0
    seen: list[Any] = []
    for packet in chain(packets, [None]):
        seen += [] if packet is None else [packet]
        size += 0 if packet is None else packet.size
        if context.codec_tag in ("encv", "drmi") or (
            seen and seen[0].has_sidedata("encryption_info")
        ):
            # decoders make noise of it
            raise SourceUnreadable(
                f"{name} is encrypted: it has digital rights management",
                hint="name a copy that is not encrypted",
            )
        try:
            first = next(iter(context.decode(packet)), None) if seen else None
        except Exception:  # PyAV raises more than its own errors on a damaged file
            failures += 1
        if first is not None or failures > _MOST_FAILURES or size > _MOST_BYTES:
            break
    if first is None:
        if not seen and kind != "file" and "mov" in container.format.name:
            raise make_mp4_index_error(name)
        raise SourceUnreadable(
            f"no frame of {name} can be decoded (container {container.format.name}, codec "
            f"{context.name})",
            hint="the file is damaged, its codec is not supported, or its frames are larger than "
            "--max-frame-pixels; `ffmpeg -i FILE OUT.mp4` may repair it",
        )
    rotation, mirrored, degrees = _read_orientation(first)
    width, height = _shown_size(first.width, first.height, stream.sample_aspect_ratio)
    # 0 is unknown, 1 progressive.
    plain = not mirrored and not first.interlaced_frame and context.field_order <= 1
    plain = plain and (width, height) == (first.width, first.height)
    notes = []
    if degrees % 90:
        notes.append(
            f"it asks to be turned by about {degrees} degrees: pictures are turned by quarters only"
        )
    # FFmpeg guesses the rate of the clock where there are few frames.
    stamped = not container.format.flags & _NOTIMESTAMPS
    rates = (stream.average_rate if stamped else None, stream.guessed_rate)
    rate = next((one for one in rates if one and one <= _MOST_FPS), None)
    if not stamped:
        rate = 1 / (seen[0].duration * stream.time_base) if seen[0].duration else rate
        notes.append(f"it has no times: {float(rate or 25):.6g} frames a second are assumed")
    info = SourceInfo(
        name=name,
        kind=kind,
        decoder="pyav",
        container=container.format.name.split(",")[0],
        codec=context.codec.canonical_name,
        pixel_format=str(first.format.name),
        width=height if rotation in (90, 270) else width,
        height=width if rotation in (90, 270) else height,
        rotation=rotation,
        mirrored=mirrored,
        rate_fps=float(rate) if rate else None,
    )
    # `frames` is 0 for fragmented files, whose index grows while they are read.
    indexed = info.container == "mov" and bool(stream.frames) and len(stream.index_entries) > 0
    timing = _read_timing(container, stream, seen[0], indexed=indexed)
    if info.container in _WITHOUT_PTS:
        timing = replace(timing, has_pts=False, delay=(first.dts or 0) - (seen[0].dts or 0))
    if rate:
        timing = replace(timing, interval_s=float(1 / rate))
    return StreamProbe(info, timing, indexed, plain, notes, chain(seen, packets))


def _read_orientation(frame: Any) -> tuple[int, bool, int]:
    """Return how a frame asks to be shown: by its display matrix, or by the EXIF of a picture.

    Returns:
        Degrees counter-clockwise (0, 90, 180, 270), whether it is mirrored left to right before
        that, and the degrees clockwise that it asks for.
    """
    mirrored = _is_mirrored(frame)
    # FFmpeg gives the angle of an axis, which a mirror reverses.
    degrees = (180 * mirrored - frame.rotation) % 360
    return -90 * round(degrees / 90) % 360, mirrored, degrees


def _is_mirrored(frame: Any) -> bool:
    """Return True if the EXIF or the display matrix of a frame mirrors it.

    PyAV's objects for side data refuse the kinds that they do not know, such as EXIF, and crash on
    profiles of colours. FFmpeg's encoder of PNG writes both, so it tells whether they are there.
    """
    # A frame that was asked for its side data stays until Python looks for cycles, and with it the
    # threads of a reformatter of its own.
    small = VideoReformatter().reformat(frame, 16, 16, "rgb24", interpolation="POINT")
    encoder: Any = av.CodecContext.create("png", "w")
    encoder.width = encoder.height = 16
    encoder.pix_fmt = "rgb24"
    encoder.time_base = Fraction(1, 25)
    data = b"".join(map(bytes, [*encoder.encode(small), *encoder.encode(None)]))
    with Image.open(io.BytesIO(data)) as png:
        exif = png.getexif()
        if exif or "icc_profile" in png.info:
            return exif.get(ExifTags.Base.Orientation) in _MIRRORED
    with suppress(ValueError):
        matrix = (one for one in frame.side_data if one.type.name == "DISPLAYMATRIX")
        # A point (x, y) goes to (a x + c y, b x + d y).
        for a, b, _, c, d in (struct.unpack("=5i", bytes(one)[:20]) for one in matrix):
            return bool(a * d < b * c)
    return False


def _shown_size(width: int, height: int, pixel: Fraction | None) -> tuple[int, int]:
    """Return the size of a picture with square pixels: one side grows, as in browsers; above 8K,
    the other shrinks.
    """
    if not pixel or not 1 / _WIDEST_PIXEL <= pixel <= _WIDEST_PIXEL:
        return width, height
    too_large = width * height * max(pixel, 1 / pixel) > MAX_FRAME_PIXELS
    if too_large == (pixel > 1):
        return width, round(height / pixel)
    return round(width * pixel), height


def convert_frame_to_rgb(frame: Any, info: SourceInfo, reformatter: Any) -> Picture:
    """Return a decoded frame as RGB `[h, w, 3]` uint8 in the shape and orientation of the source.

    A stream may change its size on the way; all its frames get one size. PQ, HLG and BT.2020 are
    shown as an ordinary screen does. FFmpeg needs seconds to prepare that, and does it once for a
    `reformatter`. PyAV before 16 does not tell what they are.
    """
    width, height = info.width, info.height
    if info.rotation in (90, 270):
        width, height = height, width
    wide = getattr(frame, "color_trc", None) in _WIDE
    how = {"dst_color_trc": _BT709, "dst_color_primaries": _BT709} if wide else {}
    image: Picture = reformatter.reformat(frame, width, height, "rgb24", **how).to_ndarray()
    if info.mirrored:
        image = image[:, ::-1]
    return np.ascontiguousarray(np.rot90(image, info.rotation // 90))


def _read_timing(container: Any, stream: Any, head: Any, *, indexed: bool) -> PacketTiming:
    """Return when a stream begins and ends, by its header and its first packet where they are
    credible. A length of 0 is unknown.
    """
    name = container.format.name.partition(",")[0]
    base = stream.time_base
    declares = indexed or name in _DECLARING
    first = head.dts if head.pts is None or name in _WITHOUT_PTS else head.pts
    own_s = _own_length_s(stream)
    whole_s = max(0, container.duration or 0) / av.time_base
    bound_s = bound_declared_end(max(own_s, whole_s)) if declares else LONGEST_GAP_S
    origin = _origin(container, base, first or 0, bound_s)
    late_s = max(0.0, float(origin * base))
    begins_s = 0.0 if stream.start_time is None else float((stream.start_time - origin) * base)
    if name in _COUNTING_FROM_ZERO:
        # FLV may count from the start.
        from_zero = name == "matroska" or late_s < max(own_s, whole_s)
        begins_s = -late_s if from_zero else 0.0
        whole_s = whole_s and whole_s + begins_s
    ends_s = [own_s + begins_s] if own_s else []
    # With other streams, the whole may be longer than the video.
    ends_s += [whole_s] if whole_s and (own_s or len(container.streams) == 1) else []
    stated_s = max(0.0, min(ends_s, default=0.0))
    # No file of these bytes lasts longer; none is known of a pipe. A header that states no ticks of
    # a second is damaged: FFmpeg takes each for a second, and its stamps say nothing.
    carried_s = container.size / _FEWEST_BYTES if (container.size or 0) > 0 else math.inf
    carried_s = 0.0 if name == "mov" and base == 1 and not declares else carried_s
    if not declares and stated_s > carried_s:
        stated_s = 0.0
    # A copied tag of a stream of Matroska may say less than the whole.
    declared_s = max(stated_s, whole_s if name == "matroska" else 0.0) if declares else 0.0
    confirmed_s = max(declared_s, whole_s if declares or name == "flv" else 0.0)
    return PacketTiming(
        base,
        origin,
        duration_s=stated_s or None,
        declared_s=declared_s or None,
        confirmed_s=confirmed_s,
        carried_s=carried_s,
        longest_pause_s=max(LONGEST_GAP_S, bound_declared_end(whole_s))
        if name in _STATING and whole_s
        else LONGEST_PAUSE_S,
        cuts=name in ("mpegts", "hls"),
    )


def _origin(container: Any, base: Fraction, first: int, bound_s: float) -> int:
    """Return the tick at which the container begins; that of the first packet if the two are far
    apart.
    """
    if container.start_time is None:
        return first
    stated = round(container.start_time / av.time_base / base)
    return first if (first - stated) * base > bound_s else min(first, stated)


def _own_length_s(stream: Any) -> float:
    """Return the length of the pictures in seconds, from the stream or from a tag of Matroska; 0 if
    it is not stated.
    """
    if stream.duration:
        return float(stream.duration * stream.time_base)
    tag = next((value for key, value in stream.metadata.items() if key.upper() == "DURATION"), "")
    if not re.fullmatch(r"\d+:\d\d:\d\d(\.\d+)?", tag):
        return 0.0
    hours, minutes, seconds = map(float, tag.split(":"))
    return hours * 3600 + minutes * 60 + seconds
