"""Read a video file with decord: the frames that PyAV gives, byte for byte; PyAV takes over at the first doubt.

Known of decord 0.6.0, and how it is guarded:

- It decodes ahead without bound while its reader pauses (2 minutes of 720p took 5 GB). Frames are read in chunks of
  at most `CHUNK_BYTES` of wanted images, and a seek after each chunk ends the decoding ahead.
- Where it cannot decode, it raises, conceals, or repeats the last good frame. A chunk counts only if all its frames
  came and none equals the one before; else PyAV reads on, and every frame says who decoded it. Damage that decord
  conceals by another picture goes unnoticed: use PyAV for files of unknown origin.
- After a seek into groups of pictures that refer to the group before, its count is wrong: PyAV reads such files.
- It turns frames by the file's display matrix itself; nothing is turned here.
- Its times are float32 and its count may be off: PyAV's demultiplexer lists the times, which costs no decoding.
- Its FFmpeg has no list of allowed formats, and goes by names too. It gets only files that are named like a video and
  begin like one, so that it takes none for a playlist or a sequence of images.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from protokv.errors import SourceUnreadable
from protokv.video.address import VIDEO_SUFFIXES
from protokv.video.container import opened
from protokv.video.probe import Probe, packets
from protokv.video.pyav_source import PyAVSource
from protokv.video.report import DecodeReport
from protokv.video.sampling import SLACK_S
from protokv.video.source import Frame, Image, Wanted

# A chunk of 720p at two frames a second is a quarter of a minute.
CHUNK_BYTES = 128 << 20
CHUNK_FRAMES = 4096

# decord's own FFmpeg is of 2021: these it was seen to read and to decode like a current one, in 8 bits.
# FFmpeg looks for those with a pattern anywhere in the file.
CONTAINERS = {"mov": rb"", "matroska": rb"", "flv": rb"", "mpegts": rb"G|....G", "mpeg": rb"\0\0\1"}
CODECS = {"h264", "hevc", "mpeg4", "vp8", "vp9", "mpeg1video", "mpeg2video", "mjpeg"}
PIXEL_FORMATS = {"yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p", "gray", "nv12"}


class Shown(NamedTuple):
    """When a frame appears and how long it stays, in seconds."""

    time_s: float
    duration_s: float | None


def unsuited(probe: Probe) -> str:
    """Return why decord should not read this file; empty if it may."""
    info = probe.info
    if not probe.has_pts:
        return f"{info.container} files carry no presentation times"
    if info.container not in CONTAINERS:
        return f"decord is not known to read {info.container} files"
    with probe.path.open("rb") as file:
        named = probe.path.suffix.lower() in VIDEO_SUFFIXES
        if not named or not re.match(CONTAINERS[info.container], file.read(8), re.DOTALL):
            return "it is not named like a video, or does not begin like one"
    if info.codec not in CODECS:
        return f"decord is not known to decode {info.codec}"
    if info.pixel_format not in PIXEL_FORMATS:
        return f"decord is not known to decode {info.pixel_format} exactly"
    if probe.interlaced:
        return "decord does not convert interlaced frames exactly"
    return ""


class DecordSource(PyAVSource):
    """Read one file with decord, and with PyAV where decord cannot. See `Source` for the contract.

    Raises SourceUnreadable if `unsuited` gives a reason, or decord cannot be loaded.
    """

    decoder = "decord"

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        if reason := unsuited(probe):
            raise SourceUnreadable(f"decord cannot read {probe.path.name}: {reason}", hint="use the decoder pyav")
        self._decord = _load()

    def _read(self, wanted: Wanted) -> Iterator[Frame]:
        listed = self._listed()
        reader = self._reader(listed) if listed else None
        if listed is None or reader is None:
            yield from super()._read(wanted)
            return
        self._report = DecodeReport(0.0 if wanted.from_beginning else wanted.start_s)
        keep = _looked_at(listed, wanted)
        size = self.info.width * self.info.height * 3
        first = max(0, bisect_right(listed, wanted.start_s, key=lambda one: one.time_s) - 1)
        keep[first] = True
        if wanted.fps is not None and not listed[-1].duration_s and len(listed) > 1:
            gap_s = listed[-1].time_s - listed[-2].time_s
            listed[-1] = Shown(listed[-1].time_s, min(gap_s, 1.0 / wanted.fps))
        before: Image | None = None
        while first < len(listed):
            if wanted.should_stop():
                return
            end = _chunk_end(keep, first, max(1, CHUNK_BYTES // size))
            images = self._chunk(reader, first, end, keep, before)
            if images is None:
                begin_s = max(wanted.start_s, listed[first].time_s)
                yield from super()._read(wanted._replace(start_s=begin_s))
                return
            before = images.pop(None)
            for i in sorted(i for i in images if i is not None):
                if wanted.should_stop():
                    return
                one = listed[i]
                yield Frame(one.time_s, images.pop(i), one.duration_s, "decord")
            first = end

    def _listed(self) -> list[Shown] | None:
        """Return every frame of the file in order of presentation; None if decord may count or time them otherwise.

        That is so where the file is damaged, where packets and frames are not one to one, where a frame after a key
        frame is shown before it, and where time stamps leap.
        """
        listed: list[Shown] = []
        report = DecodeReport()
        key_s = float("-inf")
        with opened(self.probe.path, self.probe.max_pixels) as (container, stream):
            for packet in packets(self.probe, container, stream, 0.0, report):
                time_s = self.probe.expected_s(packet)
                if time_s is None or packet.is_corrupt or time_s < key_s:
                    return None
                if self.probe.timeline.leaps(listed[-1].time_s if listed else 0.0, time_s):
                    return None
                if listed and time_s < listed[-1].time_s and not self.probe.reordered:
                    return None
                key_s = time_s if packet.is_keyframe else key_s
                duration_s = float(packet.duration * self.probe.time_base) if packet.duration else None
                listed.append(Shown(time_s, duration_s))
        listed.sort()
        return listed if report.damage.ok and all(a.time_s < b.time_s for a, b in pairwise(listed)) else None

    def _reader(self, listed: list[Shown]) -> Any | None:
        """Return decord's reader if it counts the same frames at the same times, else None."""
        try:
            reader = self._decord.VideoReader(str(self.probe.path), ctx=self._decord.cpu(0), num_threads=1)
            if len(reader) != len(listed):
                return None
            shown_s = np.asarray(reader.get_frame_timestamp(list(range(len(listed)))))[:, 0]
        except (self._decord.DECORDError, OSError, RuntimeError, ValueError):
            return None
        due_s = np.array([one.time_s for one in listed])
        # decord gives float32, from an origin of its own.
        off_s = np.abs((shown_s - shown_s[0]) - (due_s - due_s[0]))
        return reader if off_s.max() <= 1e-3 + due_s[-1] * 1e-6 else None

    def _chunk(
        self, reader: Any, first: int, end: int, keep: np.ndarray, before: Image | None
    ) -> dict[int | None, Image] | None:
        """Return the wanted images of frames `first` to `end`, and the last one under None; None on any doubt."""
        images: dict[int | None, Image] = {}
        size = (self.info.height, self.info.width, 3)
        try:
            reader.seek_accurate(first)
            for i in range(first, end):
                image = _array(reader.next())
                if image.shape != size or image.dtype != np.uint8:
                    return None
                # A still, or a loss that decord hides: after one, the frames before it may be off by one too.
                if before is not None and _equal(image, before):
                    return None
                if keep[i]:
                    images[i] = image
                before = image
            reader.seek(0)
        except (self._decord.DECORDError, StopIteration, OSError, RuntimeError, ValueError):
            return None
        assert before is not None
        images[None] = before
        return images


def _looked_at(listed: list[Shown], wanted: Wanted) -> np.ndarray:
    """Return which frames are shown at a multiple of `1 / fps`, and the last one; bool `[n]`."""
    keep = np.ones(len(listed), bool)
    if wanted.fps is None:
        return keep
    begin_s = np.array([one.time_s for one in listed])
    # Shown at k / fps where k / fps lies between the times of this frame and of the next.
    slots = np.ceil((begin_s - SLACK_S) * wanted.fps)
    keep[:-1] = slots[:-1] < slots[1:]
    # Sampling times are exact fractions: the two neighbours of each are kept rather than rounded away.
    keep[:-1] |= keep[1:]
    keep[0] = True
    return keep


def _equal(a: Image, b: Image) -> bool:
    # Most frames differ in the first look at every 16th pixel.
    return np.array_equal(a[::16, ::16], b[::16, ::16]) and np.array_equal(a, b)


def _chunk_end(keep: np.ndarray, first: int, images: int) -> int:
    """Return the end of a chunk from `first` on that holds at most this many images to keep."""
    kept = np.flatnonzero(keep[first : first + CHUNK_FRAMES])
    return first + (int(kept[images]) if len(kept) > images else min(CHUNK_FRAMES, len(keep) - first))


def _load() -> Any:
    # decord must be imported after torch: the other order crashes (dmlc/decord#293, #263).
    import torch  # noqa: F401

    # How often the library asks a slow decoder for the last frames of a file before it gives up.
    os.environ.setdefault("DECORD_EOF_RETRY_MAX", "20480")
    try:
        import decord
    except (ImportError, OSError, RuntimeError) as error:
        raise SourceUnreadable(f"decord cannot be loaded: {error}", hint="use the decoder pyav") from error
    decord.logging.set_level(decord.logging.QUIET)
    return decord


def _array(frame: Any) -> Image:
    # With another bridge set by the caller's code, decord gives that framework's tensors.
    return np.asarray(frame.asnumpy() if hasattr(frame, "asnumpy") else frame.numpy())
