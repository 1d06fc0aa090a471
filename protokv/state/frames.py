"""The frames of a stream, read again from the videos that a state watched."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from protokv.errors import (
    ConfigError,
    SourceNotFound,
    SourceUnreadable,
    StateError,
    StateMismatch,
    escape_text,
)
from protokv.state.header import StateHeader
from protokv.state.reader import read_thumbnails
from protokv.state.sources import VideoPlace, list_state_sources, list_video_places
from protokv.video import open_source
from protokv.video.registry import fingerprint_video_file

# Where each video stands in the stream, and its file.
StateVideos = Sequence[tuple[VideoPlace, Path]]


def find_state_videos(header: StateHeader, places: Sequence[Path]) -> StateVideos:
    """Return the videos of a state, each from the first of the files or folders `places` that has
    it.

    A state is untrusted and names no folder; a file counts if it has the fingerprint in the state.
    SourceNotFound: it is not at hand. StateMismatch: it has changed.
    """
    found = []
    for one in list_video_places(list_state_sources(header)):
        path = next(
            (file for place in places for file in (place, place / one.name) if file.is_file()), None
        )
        if path is None:
            raise SourceNotFound(
                f"the video {escape_text(one.name)} of this state is not at hand",
                hint="name the file, or the folder it is in, with --video",
            )
        if fingerprint_video_file(path) != one.digest:
            raise StateMismatch(
                f"{path} is not the video that this state watched, or has changed since",
                hint="name the one that it watched with --video",
            )
        found.append((one, path))
    return found


def read_frame(videos: StateVideos, time_s: float) -> tuple[VideoPlace, Any]:
    """Return the video that is seen at a stream time, and its frame then, `[h, w, 3]` uint8 RGB.
    SourceError: it has none.
    """
    place, file = [one for one in videos if one[0].start_s <= time_s][-1]
    in_file_s = place.video_time(time_s)
    with open_source(str(file)) as source:
        frame = next(iter(source.frames(in_file_s)), None)
    if frame is None:
        raise SourceUnreadable(f"{file} has no frame at {in_file_s:g} s")
    return place, frame.image


def show_moments(
    state: Path, times: Sequence[float], most: int, holds: Callable[[Path], bool], side: int
) -> Iterator[tuple[str, bytes]]:
    """Yield a line and a JPEG of at most `side` pixels a side for each stream time: of the videos
    beside a state, which `holds` allows, else of the nearest thumbnails in it.

    ConfigError: a time is not in the stream, or there are more than `most`. SourceNotFound,
    StateMismatch: it has neither. SourceError, StateError.
    """
    header, kept = read_thumbnails(state)
    end_s = header.clock.stream_time_s
    if len(times) > most or not all(0 <= one < end_s for one in times):
        raise ConfigError(f"times: at most {most}, below {end_s:g} seconds")
    try:
        videos = find_state_videos(header, [state.parent])
        if not all(holds(file) for _, file in videos):
            raise SourceNotFound("its video is a link out of the folder")
    except (SourceNotFound, StateError):
        if not kept:
            raise
        for one in times:
            _, near = min((abs(picture.time_s - one), picture) for picture in kept)
            yield f"the picture nearest to {one:g} s is of {near.time_s:g} s", near.jpeg
        return
    for one in times:
        place, frame = read_frame(videos, one)
        picture = Image.fromarray(frame)
        picture.thumbnail((side, side))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=85)
        yield f"{one:g} s; {place.video_time(one):g} s of {place.name}", file.getvalue()
