"""The frames of a stream, read again from the videos that a state watched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protokv.errors import SourceNotFound, SourceUnreadable, StateMismatch, escape_text
from protokv.state.header import StateHeader
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
            why = f"the video {escape_text(one.name)} of this state is not at hand"
            raise SourceNotFound(why, hint="name the file, or the folder it is in, with --video")
        if fingerprint_video_file(path) != one.digest:
            why = f"{path} is not the video that this state watched, or has changed since"
            raise StateMismatch(why, hint="name the one that it watched with --video")
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
