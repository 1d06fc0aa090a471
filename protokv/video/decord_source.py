"""Read a video file with decord: the frames that PyAV gives, byte for byte; PyAV takes over at the first doubt.

Known of decord 0.6.0: it decodes ahead without bound while its reader pauses, so frames are read in chunks, and a seek
after each ends that. Where it cannot decode, it raises or repeats the last good frame, so a chunk counts only if no
frame of it equals the one before; other damage that it conceals goes unnoticed. Its count is wrong in open groups of
pictures, and its times are float32, so PyAV lists the times. Its FFmpeg of 2021 goes by the names of files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from protokv.errors import SourceUnreadable
from protokv.video.address import VIDEO_SUFFIXES
from protokv.video.av_source import AVSource
from protokv.video.sampling import SLACK_S
from protokv.video.source import Frame, FrameRequest

# A chunk of 720p at two frames a second is a quarter of a minute.
CHUNK_BYTES = 128 << 20

# What decord was seen to decode like a current FFmpeg, in 8 bits.
_CODECS = {"h264", "hevc", "mpeg4", "vp8", "vp9", "mjpeg"}
_PIXELS = {"yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p", "gray", "nv12"}


class DecordSource(AVSource):
    """Read one file with decord, and with PyAV where decord cannot. See `Source` for the contract.

    Raises SourceUnreadable for a file that decord is not known to read exactly, or if decord cannot be loaded.
    """

    decoder = "decord"

    def __init__(self, path: str | os.PathLike[str], max_pixels: int | None = None) -> None:
        super().__init__(path, max_pixels)
        info = self.info
        known = info.container in ("mov", "matroska") and info.codec in _CODECS and info.pixel_format in _PIXELS
        if not (known and self.plain and Path(path).suffix.lower() in VIDEO_SUFFIXES) or self.notes:
            raise SourceUnreadable(
                f"decord cannot read {info.name}: it is known to read only one plain, progressive track of 8 bits in "
                f"MP4 and Matroska exactly, and this is {info.codec} as {info.pixel_format} in {info.container}",
                hint="use the decoder pyav",
            )
        # decord must be imported after torch: the other order crashes (dmlc/decord#293, #263).
        import torch  # noqa: F401

        # How often the library asks a slow decoder for the last frames of a file before it gives up.
        os.environ.setdefault("DECORD_EOF_RETRY_MAX", "20480")
        try:
            import decord
        except (ImportError, OSError, RuntimeError) as error:
            raise SourceUnreadable(f"decord cannot be loaded: {error}", hint="use the decoder pyav") from error
        decord.logging.set_level(decord.logging.QUIET)
        self._decord = decord

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        listed = self._list_frames()
        times_s = np.array([time_s for time_s, _ in listed])
        first = max(0, int(np.searchsorted(times_s, wanted.start_s, "right")) - 1)
        keep = np.ones(len(listed), bool)
        if wanted.fps is not None and len(keep) > 3:
            # Frames shown at a multiple of 1 / fps, and their neighbours: those times are exact, and these are not.
            slots = np.ceil((times_s - SLACK_S) * wanted.fps)
            keep[1:-2] = (slots[1:-2] < slots[2:-1]) | (slots[2:-1] < slots[3:])
        keep[first : first + 1] = True
        given = -1
        for chunk in self._chunks(first, keep):
            for i, image in chunk:
                if wanted.should_stop():
                    return
                given = i
                yield Frame(listed[i][0], image, listed[i][1], "decord")
        if given < len(listed) - 1 or not listed:
            after_s = times_s[given + 1] if given >= 0 else 0.0
            yield from super()._read(wanted._replace(start_s=max(wanted.start_s, after_s)))

    def _list_frames(self) -> list[tuple[float, float | None]]:
        """Return time and duration of every frame, by time; nothing if decord may count them otherwise.

        So it is where the file is damaged, time stamps leap, or a frame after a key frame is shown before it.
        """
        listed: list[tuple[float, float | None]] = []
        key_s, opened = float("-inf"), self._open()
        self._losses, decoding = opened.losses, self._start_decoding(opened)
        with opened.container:
            for packet in decoding.settle(opened.found.packets):
                time_s = packet and decoding.expected_s(packet)
                if time_s is None or packet.is_corrupt or time_s < key_s:
                    return []
                key_s = time_s if packet.is_keyframe else key_s
                listed.append((time_s, float(packet.duration * self.timing.time_base) if packet.duration else None))
            decoding.check_end()
        listed.sort(key=lambda one: one[0])
        return listed if self.damage.ok and all(a[0] < b[0] for a, b in pairwise(listed)) else []

    def _chunks(self, first: int, keep: np.ndarray) -> Iterator[list[tuple[int, np.ndarray]]]:
        """Give the frames to keep with their numbers, from the first on, as long as there is no doubt."""
        most = max(1, CHUNK_BYTES // (self.info.width * self.info.height * 3))
        before = np.empty(0)
        try:
            reader = self._decord.VideoReader(self.source, ctx=self._decord.cpu(0), num_threads=1)
            while first < len(keep) == len(reader):
                reader.seek_accurate(first)
                chunk: list[tuple[int, np.ndarray]] = []
                while first < len(keep) and len(chunk) < most:
                    frame = reader.next()
                    # With another bridge set by the caller's code, decord gives that framework's tensors.
                    image = np.asarray(frame.asnumpy() if hasattr(frame, "asnumpy") else frame.numpy())
                    if np.array_equal(image, before) or image.shape != (self.info.height, self.info.width, 3):
                        return
                    chunk += [(first, image)] if keep[first] else []
                    before, first = image, first + 1
                reader.seek(0)
                yield chunk
        except (self._decord.DECORDError, StopIteration, OSError, RuntimeError, ValueError):
            return
