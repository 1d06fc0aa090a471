"""Read a video file with PyAV, from its beginning or from a later time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from protokv.errors import SourceUnreadable
from protokv.video.container import MAX_PIXELS, convert_to_rgb, explain_error, open_container
from protokv.video.decoding import FrameDecoding, read_packets, skip_to_key
from protokv.video.file import fingerprint
from protokv.video.probe import look_into
from protokv.video.report import DecodeReport
from protokv.video.source import Damage, Frame, FrameRequest, Image, Lines, Source, drop_before
from protokv.video.text_tracks import find_text_tracks, read_text_track

# Seconds to look back, one after the other, if a seek did not land at or before the wanted time.
LOOK_BACK_S = (0.0, 2.0, 10.0, 60.0, math.inf)

# These containers have an index, and one clock from beginning to end.
WITH_INDEX = {"mov", "matroska", "avi", "asf", "mxf"}


class PyAVSource(Source):
    """Reads one file with PyAV. See `Source` for the contract.

    Raises:
        SourceUnreadable: no picture can be had, or one of more than `max_pixels`.
    """

    decoder = "pyav"

    def __init__(self, path: str | os.PathLike[str], max_pixels: int | None = None) -> None:
        self.path, self._max_pixels = Path(path), max_pixels or MAX_PIXELS
        self._report = DecodeReport()
        with open_container(self.path, self._max_pixels) as (container, stream, notes):
            packets = read_packets(container, stream, lambda error: None)
            try:
                found = look_into(self.path, "file", container, stream, packets, self._max_pixels)
            except SourceUnreadable:
                raise
            except Exception as error:  # PyAV raises more than its own errors on a damaged file
                raise self._unreadable(error) from error
            self.probe, self.plain, self.texts = found.probe, found.plain, find_text_tracks(container)
        self._notes = (*notes, *found.notes)
        self.info = replace(
            found.info,
            name=self.path.name,
            decoder=self.decoder,
            duration_s=self.probe.duration_s,
            size_bytes=self.path.stat().st_size,
            fingerprint=fingerprint(self.path),
        )

    def lines(self, number: int) -> Lines:
        """See `Source`."""
        return read_text_track(self.path, number, float(self.probe.origin * self.probe.time_base))

    @property
    def damage(self) -> Damage:
        """See `Source`."""
        return self._report.damage

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        if wanted.from_beginning or wanted.start_s <= 0:
            self._report = DecodeReport(0.0 if wanted.from_beginning else wanted.start_s)
            yield from self._from_beginning(wanted)
            return
        given_s = -1.0
        for frame in self._from_key(wanted):
            # A decoder conceals damage by earlier frames, so only a reading from the beginning gives the same frames.
            if self._report.met_damage:
                break
            given_s = frame.time_s
            yield frame
        if self._report.met_damage and not wanted.should_stop():
            self._report = DecodeReport(wanted.start_s)
            yield from (frame for frame in self._from_beginning(wanted) if frame.time_s > given_s)

    def _from_beginning(self, wanted: FrameRequest) -> Iterator[Frame]:
        with open_container(self.path, self._max_pixels) as (container, stream, _):
            yield from drop_before(self._decode(container, stream, wanted), wanted.start_s)

    def _from_key(self, wanted: FrameRequest) -> Iterator[Frame]:
        """Decode from a key frame at or before the start; from the beginning if no seek leads to one."""
        with_index = self.info.container in WITH_INDEX and (self.probe.indexed or self.info.container != "mov")
        for back_s in LOOK_BACK_S if with_index else (math.inf,):
            from_s = max(0.0, wanted.start_s - back_s)
            self._report = DecodeReport(wanted.start_s)
            with open_container(self.path, self._max_pixels) as (container, stream, _):
                try:
                    given = self._decode(container, stream, wanted, from_s, skip=not with_index)
                    first = next(given, None)
                except Exception as error:
                    if from_s <= 0:
                        raise self._unreadable(error) from error
                    continue  # this container cannot seek: look further back
                if wanted.should_stop():
                    return
                if from_s > 0 and (first is None or first.time_s > wanted.start_s):
                    continue
                if first is not None:
                    yield from drop_before(chain([first], given), wanted.start_s)
                return

    def _decode(
        self, container: Any, stream: Any, wanted: FrameRequest, from_s: float = 0.0, *, skip: bool = False
    ) -> Iterator[Frame]:
        """Decode from the key frame at or before `from_s` by seeking; with `skip`, before the start by reading."""
        if from_s > 0:
            container.seek(self.probe.ticks(from_s), stream=stream, backward=True, any_frame=False)
        report = self._report
        decoding = self._start_decoding(stream, report, sought=from_s > 0, after_key=skip or from_s > 0)
        packets = read_packets(container, stream, lambda error: report.note_failure(None, explain_error(error)))
        settled = decoding.settle(packets)
        if skip:
            settled = skip_to_key(self.probe, settled, wanted.start_s)
        for decoded in decoding.frames(settled, wanted.should_stop):
            if (frame := decoding.place(decoded)) is not None:
                yield frame

    def _start_decoding(
        self, stream: Any, report: DecodeReport, *, sought: bool = False, after_key: bool = False
    ) -> FrameDecoding:
        return FrameDecoding(
            self.probe, stream, report, self._convert, sought=sought, after_key=after_key, on_note=self.add_note
        )

    def _convert(self, frame: Any) -> Image:
        try:
            return convert_to_rgb(frame, self.info)
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> SourceUnreadable:
        """Turn an error of PyAV into an error for users."""
        return SourceUnreadable(
            f"{self.path.name} cannot be read: {explain_error(error)}", hint="the file is damaged; copy or repair it"
        )
