"""decord as a video source, behind guards that make it give what PyAV gives, frame for frame.

Measured with decord 0.6.0: it decodes in the background without bound (2 minutes of 720p took 5 GB while the
reader paused), and where it cannot decode it raises at a moment that differs between runs, or silently
conceals, or repeats the last good frame, even at the end of a sound stream. So it never sees the file: PyAV cuts
the stream into segments that stand on their own, each is put into memory and read by decord whole, and that
counts only if PyAV finds no damage in it and every frame came, at the right time, none like the one before. What
does not count is read by PyAV. Memory is bounded by `SEGMENT_BYTES` of decoded frames.
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import av
import av.error
import numpy as np

from protokv.errors import SourceUnreadable
from protokv.video.container import Probe, packets
from protokv.video.ledger import Ledger
from protokv.video.pyav_source import PyAVSource, decode, turned
from protokv.video.segments import segments
from protokv.video.source import Frame, Image

SEGMENT_BYTES = 512 << 20

# decord's own FFmpeg is of 2021: these it was seen to decode like a current one, in 8 bits.
CODECS = {"h264", "hevc", "mpeg4", "vp8", "vp9", "mpeg1video", "mpeg2video", "mjpeg"}
BOXES = {"vp8": "matroska", "mjpeg": "matroska"}
PIXEL_FORMATS = {"yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p", "gray", "nv12"}


def is_installed() -> bool:
    """Whether decord could be imported; it is not."""
    return importlib.util.find_spec("decord") is not None


def unsuited(probe: Probe) -> str:
    """Why decord should not read this file; empty where it may."""
    if not is_installed():
        return "decord is not installed"
    if not probe.has_pts:
        return f"{probe.container} files carry no presentation times"
    if probe.codec not in CODECS:
        return f"decord is not known to decode {probe.codec}"
    if probe.pixel_format not in PIXEL_FORMATS:
        return f"decord is not known to decode {probe.pixel_format} exactly"
    if probe.interlaced:
        return "decord does not convert interlaced frames exactly"
    if probe.longest_gop is not None and probe.longest_gop > _limit(probe):
        return f"its key frames are {probe.longest_gop} frames apart, more than decord may hold in memory at this size"
    return ""


def _limit(probe: Probe) -> int:
    """Frames that a segment may have."""
    return max(2, SEGMENT_BYTES // (probe.width * probe.height * 3))


class DecordSource(PyAVSource):
    """Reads one file with decord, segment by segment. See `Source` for the contract.

    Raises SourceUnreadable where `unsuited` gives a reason, or decord cannot be loaded.
    """

    decoder = "decord"

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        if reason := unsuited(probe):
            raise SourceUnreadable(
                f"decord cannot read {probe.path.name}: {reason}", hint="use the decoder `auto` or `pyav`"
            )
        self._decord = _load()

    def _decode(self, container: Any, stream: Any, from_s: float, ledger: Ledger) -> Iterator[Frame]:
        read = packets(self.probe, container, stream, from_s, ledger)
        counts = self.frames_by_decoder
        # Stills and damage seldom come alone: after the first doubt PyAV reads on, rather than every segment twice.
        trusted = True
        for segment in segments(read, _limit(self.probe)):
            if not segment.fit:
                rest = chain(segment.packets, read)
                yield from decode(self.probe, stream, rest, ledger, counts, drop_leading=from_s > 0)
                return
            held = segment.packets
            if from_s > 0:
                # After a seek, what is shown before the first key frame needs packets that are not here.
                held = [packet for packet in held if packet.pts >= held[0].pts]
            images = self._segment(stream, held) if trusted else None
            if images is None:
                trusted = False
                yield from decode(self.probe, stream, held, ledger, counts)
                continue
            images.reverse()
            for packet in sorted(held, key=lambda p: p.pts):
                image = images.pop()
                time_s = self.probe.time_s(packet.pts)
                ledger.sent(time_s)
                if ledger.shown(time_s):
                    counts["decord"] = counts.get("decord", 0) + 1
                    duration_s = float(packet.duration * self.probe.time_base) if packet.duration else None
                    yield Frame(time_s, image, duration_s)

    def _segment(self, stream: Any, held: list[Any]) -> list[Image] | None:
        """Images in order of presentation, or None where decord's reading is not beyond doubt."""
        pts = sorted(p.pts for p in held)
        if len(set(pts)) < len(pts) or any(p.is_corrupt or p.is_discard for p in held):
            return None
        if self.probe.codec == "vp8" and any(not bytes(p)[0] & 0x10 for p in held):
            return None
        if not _undamaged(stream, held):
            return None
        try:
            reader = self._decord.VideoReader(_boxed(stream, held), ctx=self._decord.cpu(0), num_threads=1)
            if len(reader) != len(held):
                return None
            shown_s = np.asarray(reader.get_frame_timestamp(list(range(len(held)))))[:, 0]
            images = [_array(reader.next()) for _ in held]
        except (self._decord.DECORDError, av.error.FFmpegError, StopIteration, OSError, RuntimeError, ValueError):
            return None
        due_s = np.array([float((t - pts[0]) * self.probe.time_base) for t in pts])
        # decord keeps times in float32.
        if np.abs(shown_s - due_s).max() > 1e-3 + due_s[-1] * 1e-6:
            return None
        size = (self.probe.height, self.probe.width, 3)
        if any(image.shape != size or image.dtype != np.uint8 for image in images):
            return None
        # A still, or a loss that decord hides: after one, the frames before the repetition may be off by one too.
        if any(np.array_equal(a, b) for a, b in pairwise(images)):
            return None
        return [turned(image, self.probe.rotation) for image in images]


def _load() -> Any:
    # decord must be imported after torch: the other order crashes (dmlc/decord#293, #263).
    import torch  # noqa: F401

    # Read by the library when it meets the end of a stream; its default of 10240 can look like a hang.
    os.environ.setdefault("DECORD_EOF_RETRY_MAX", "128")
    try:
        import decord
    except (ImportError, OSError, RuntimeError) as error:
        raise SourceUnreadable(f"decord cannot be loaded: {error}", hint="use the decoder `auto` or `pyav`") from error
    decord.logging.set_level(decord.logging.QUIET)
    return decord


def _boxed(stream: Any, held: list[Any]) -> io.BytesIO:
    """The packets as a file in memory, beginning at time 0."""
    box = io.BytesIO()
    first = min(p.pts for p in held)
    times = [(p.pts, p.dts, p.duration, p.time_base) for p in held]
    try:
        with av.open(box, "w", format=BOXES.get(stream.codec_context.codec.canonical_name, "mp4")) as output:
            copy = output.add_stream_from_template(stream)
            # Turning is ours; decord would turn too where the box carries the display matrix.
            copy.set_display_rotation(0)
            for packet in held:
                packet.stream = copy
                packet.pts -= first
                packet.dts = None if packet.dts is None else packet.dts - first
                output.mux(packet)
    finally:
        # Muxing moves packets to the new stream and rescales their times: give them back as they were.
        for packet, (pts, dts, duration, base) in zip(held, times, strict=True):
            packet.stream = stream
            packet.pts, packet.dts, packet.duration, packet.time_base = pts, dts, duration, base
    box.seek(0)
    return box


def _undamaged(stream: Any, held: list[Any]) -> bool:
    """Whether PyAV decodes every frame without complaint. decord conceals damaged frames and does not tell."""
    context = stream.codec_context
    context.flush_buffers()
    due = {p.pts for p in held}
    try:
        for packet in chain(held, [None]):
            for frame in context.decode(packet):
                if frame.is_corrupt:
                    return False
                due.discard(frame.pts)
    except (av.error.FFmpegError, OSError):
        return False
    return not due


def _array(frame: Any) -> Image:
    # With another bridge set by the caller's code, decord gives that framework's tensors.
    return np.asarray(frame.asnumpy() if hasattr(frame, "asnumpy") else frame.numpy())
