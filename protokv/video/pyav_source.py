"""PyAV as a video source: the reference for every file, and the fallback where decord cannot serve.

Goes on after packets that cannot be decoded and counts the frames that stayed away. Frames are converted to
RGB only when somebody looks at them, so memory and time do not depend on how many are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import TracebackType
from typing import Any, Self

import av.error
import numpy as np

from protokv.errors import SourceUnreadable
from protokv.video.container import LOOK_BACK_S, Probe, expected_s, opened, packets, reason
from protokv.video.ledger import Ledger
from protokv.video.source import Damage, Frame, Image, SourceInfo, from_shown_at


class PyAVSource:
    """Reads one file with PyAV. See `Source` for the contract."""

    decoder = "pyav"

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._ledger = Ledger()
        self._closed = False
        self.frames_by_decoder: dict[str, int] = {}

    @property
    def info(self) -> SourceInfo:
        """What opening found out; the same for every reading."""
        p = self.probe
        turned = p.rotation in (90, 270)
        return SourceInfo(
            name=p.path.name,
            kind="file",
            decoder=self.decoder,
            container=p.container,
            codec=p.codec,
            pixel_format=p.pixel_format,
            width=p.height if turned else p.width,
            height=p.width if turned else p.height,
            rotation=p.rotation,
            rate_fps=p.rate_fps,
            duration_s=p.promised_s,
            size_bytes=p.size_bytes,
            fingerprint=p.fingerprint,
        )

    @property
    def damage(self) -> Damage:
        """What the latest reading has lost so far."""
        return self._ledger.damage

    def frames(self, start_s: float = 0.0) -> Iterator[Frame]:
        """Frames from the one shown at `start_s` on. SourceUnreadable once the source is closed."""
        if self._closed:
            raise SourceUnreadable(f"{self.probe.path.name} was closed", hint="open the source again")
        return self._read(max(0.0, float(start_s)))

    def close(self) -> None:
        """End any reading before its next frame."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, start_s: float) -> Iterator[Frame]:
        for from_s in _starts(start_s):
            self._ledger = ledger = Ledger(start_s)
            self.frames_by_decoder = {}
            with opened(self.probe.path) as (container, stream):
                try:
                    given = self._decode(container, stream, from_s, ledger)
                    first = next(given, None)
                except (av.error.FFmpegError, OSError):
                    if from_s <= 0:
                        raise
                    continue  # this container cannot seek: look further back
                if from_s > 0 and (first is None or first.time_s > start_s):
                    continue
                if first is not None:
                    for frame in from_shown_at(chain([first], given), start_s):
                        if self._closed:
                            return
                        yield frame
                return

    def _decode(self, container: Any, stream: Any, from_s: float, ledger: Ledger) -> Iterator[Frame]:
        yield from decode(
            self.probe,
            stream,
            packets(self.probe, container, stream, from_s, ledger),
            ledger,
            self.frames_by_decoder,
            drop_leading=from_s > 0,
        )


def _starts(start_s: float) -> Iterator[float]:
    for back_s in LOOK_BACK_S:
        if start_s - back_s > 0:
            yield start_s - back_s
    yield 0.0


def decode(
    probe: Probe,
    stream: Any,
    packets: Iterable[Any],
    ledger: Ledger,
    counts: dict[str, int],
    *,
    drop_leading: bool = False,
) -> Iterator[Frame]:
    """Decode packets in order, to the last one, and tell the ledger.

    `drop_leading`, after a seek: pictures shown before the first key frame need packets that are not here.
    Such pictures are not counted as lost in any case. A frame marked as corrupt may show, where nothing could
    be decoded, what the decoder's memory held before: that depends on which frames the caller still keeps.
    """
    context = stream.codec_context
    context.flush_buffers()
    key_s: float | None = None
    last_ticks: int | None = None
    marked: set[float] = set()
    for packet in chain(packets, [None]):
        due_s = None if packet is None else expected_s(probe, packet)
        if packet is not None:
            if key_s is None and packet.is_keyframe:
                key_s = due_s if due_s is not None else float("-inf")
            if due_s is not None and key_s is not None and due_s >= key_s:
                ledger.sent(due_s)
            if due_s is not None and packet.is_corrupt:
                marked.add(due_s)
        try:
            frames = context.decode(packet)
        except (av.error.FFmpegError, OSError) as error:
            if packet is not None:
                ledger.failed(due_s, reason(error))
            continue
        for frame in frames:
            ticks = probe.clock(frame)
            if ticks is None:
                # AVI gives no times for the last frames: they follow at the stated rate.
                step = 1 / (probe.rate_fps or 1.0) / float(probe.time_base)
                ticks = probe.origin if last_ticks is None else last_ticks + max(1, round(step))
            if frame.interlaced_frame:
                # The two fields of a frame may come in two packets.
                ledger.stop_matching()
            time_s = probe.time_s(ticks)
            if drop_leading and key_s is not None and time_s < key_s:
                continue
            if not ledger.shown(time_s, corrupt=bool(frame.is_corrupt) or time_s in marked):
                continue
            marked.discard(time_s)
            last_ticks = ticks
            counts["pyav"] = counts.get("pyav", 0) + 1
            duration_s = float(frame.duration * probe.time_base) if frame.duration else None
            yield Frame(time_s, _converter(frame, probe), duration_s)
    ledger.finish()


def _converter(frame: Any, probe: Probe) -> Callable[[], Image]:
    def convert() -> Image:
        # A stream may change its size on the way; all frames get the size of the first.
        same = (frame.width, frame.height) == (probe.width, probe.height)
        fitted = frame if same else frame.reformat(width=probe.width, height=probe.height)
        return turned(fitted.to_ndarray(format="rgb24"), probe.rotation)

    return convert


def turned(image: Image, rotation: int) -> Image:
    """The picture turned counter-clockwise by `rotation` degrees, contiguous."""
    return np.ascontiguousarray(np.rot90(image, rotation // 90)) if rotation else image
