"""Read a video file with decord: the frames that PyAV gives, byte for byte; PyAV takes over at the
first doubt.

Known of decord 0.6.0: it decodes ahead without bound while its reader pauses, so frames are read in
chunks, and a seek after each ends that. Where it cannot decode, it raises or repeats the last good
frame, so a chunk counts only if no frame of it equals the one before; other damage that it conceals
goes unnoticed. Its count is wrong in open groups of pictures, and its times are float32, so PyAV
lists the times. Its FFmpeg of 2021 goes by the names of files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from protokv.errors import SourceUnreadable
from protokv.video.address import VIDEO_SUFFIXES
from protokv.video.av_source import AVSource
from protokv.video.source import Frame, FrameRequest

# Frames that are decoded at once take this much memory.
_CHUNK_BYTES = 128 << 20

# Formats that decord was seen to decode like a current FFmpeg, in 8 bits.
_CODECS = {"h264", "hevc", "mpeg4", "vp8", "vp9", "mjpeg"}
_PIXELS = {"yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p", "gray", "nv12"}


class DecordSource(AVSource):
    """Read one file with decord, and with PyAV where decord is not known to read exactly. See
    `Source` for the contract.

    Raises SourceUnreadable if decord cannot be loaded.
    """

    decoder = "decord"

    def __init__(self, path: str | os.PathLike[str], max_pixels: int | None = None) -> None:
        super().__init__(path, max_pixels)
        # decord must be imported after torch: the other order crashes (dmlc/decord#293, #263).
        import torch  # noqa: F401

        # How often the library asks a slow decoder for the last frames of a file before it gives
        # up.
        os.environ.setdefault("DECORD_EOF_RETRY_MAX", "20480")
        try:
            import decord
        except (ImportError, OSError, RuntimeError) as error:
            raise SourceUnreadable(
                f"decord cannot be loaded: {error}", hint="use the decoder pyav"
            ) from error
        decord.logging.set_level(decord.logging.QUIET)
        self._decord = decord
        info = self.info
        self._known = (
            info.container in ("mov", "matroska")
            and info.codec in _CODECS
            and info.pixel_format in _PIXELS
            and Path(path).suffix.lower() in VIDEO_SUFFIXES
            and self.plain
            and not self.notes
        )

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        # decord goes by the name of a file: it opens none that is not known.
        listed = self._list_frames() if self._known else []
        if not listed:
            yield from super()._read(wanted)
            return
        number = max(0, sum(time_s <= wanted.start_s for time_s, _ in listed) - 1)
        from_s = wanted.start_s
        for image in chain.from_iterable(self._chunks(number, len(listed))):
            if wanted.should_stop():
                return
            yield Frame(listed[number][0], image, listed[number][1], "decord")
            number += 1
            from_s = listed[number][0] if number < len(listed) else from_s
        if number < len(listed):
            yield from super()._read(wanted._replace(start_s=from_s))

    def _list_frames(self) -> list[tuple[float, float | None]]:
        """Return time and duration of every frame, by time; nothing if decord may count them
        otherwise.

        So it is where the file is damaged, time stamps leap, or a frame after a key frame is shown
        before it.
        """
        listed: list[tuple[float, float | None]] = []
        key_s = -math.inf
        opened = self._open()
        self._losses = opened.losses
        decoding = self._start_decoding(opened)
        with opened.container:
            for packet in decoding.settle(opened.found.packets):
                time_s = packet and decoding.expected_s(packet)
                if time_s is None or packet.is_corrupt or time_s < key_s:
                    return []
                key_s = time_s if packet.is_keyframe else key_s
                stays_s = self.timing.seconds(packet.duration or 0)
                listed.append((time_s, stays_s or None))
            decoding.check_end()
        listed.sort()
        increasing = all(a[0] < b[0] for a, b in pairwise(listed))
        return listed if self.damage.ok and increasing else []

    def _chunks(self, number: int, frames: int) -> Iterator[np.ndarray]:
        """Give the frames from one of them on, as long as there is no doubt."""
        shape = (self.info.height, self.info.width, 3)
        most = max(1, _CHUNK_BYTES // math.prod(shape))
        before = np.empty(0)
        with suppress(self._decord.DECORDError, StopIteration, OSError, RuntimeError, ValueError):
            reader = self._decord.VideoReader(self.source, ctx=self._decord.cpu(0), num_threads=1)
            while number < frames == len(reader):
                chunk = _to_array(reader.get_batch(range(number, min(number + most, frames))))
                repeats = any(np.array_equal(a, b) for a, b in pairwise([before, *chunk]))
                if repeats or chunk.shape[1:] != shape:
                    return
                before = chunk[-1]
                number += len(chunk)
                reader.seek(0)
                yield chunk


def _to_array(frames: Any) -> np.ndarray:
    """Return an array of frames. The caller's code may have told decord to give tensors."""
    return np.asarray(frames.asnumpy() if hasattr(frames, "asnumpy") else frames.numpy())
