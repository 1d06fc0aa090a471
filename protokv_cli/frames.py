"""`query --frames`: the frames of the video at the times that an answer stood on, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protokv.errors import SourceNotFound, SourceUnreadable, StateMismatch, escape_text

if TYPE_CHECKING:
    from protokv.state.reader import StateReader
    from protokv.state.sources import VideoPlace
    from protokv.stream.answer import Answer
    from protokv.stream.session import Session

# Where each video stands in the stream, and its file.
StateVideos = Sequence[tuple["VideoPlace", Path]]
_MOST_FRAMES = 8  # of one span: its first ones


def find_state_videos(reader: StateReader, video: Path | None) -> StateVideos:
    """Return the videos of a state.

    A state is untrusted and names no folder. A file in `video`, beside the state or in this folder
    counts if it has the fingerprint in the state. SourceNotFound: it is not at hand. StateMismatch:
    it has changed.
    """
    from protokv.state.sources import list_state_sources, list_video_places
    from protokv.video.registry import fingerprint_video_file

    places = [video] if video else [Path(), Path(str(reader.path)).parent]
    found = []
    for one in list_video_places(list_state_sources(reader.header)):
        name = one.name
        path = next(
            (file for place in places for file in (place, place / name) if file.is_file()), None
        )
        if path is None:
            why = (
                f"the video {escape_text(name)} of this state is not at hand: not in "
                f"{' or '.join(map(str, places))}"
            )
            raise SourceNotFound(why, hint="name the file, or the folder it is in, with --video")
        if fingerprint_video_file(path) != one.digest:
            why = f"{path} is not the video that this state watched, or has changed since"
            raise StateMismatch(why, hint="name the one that it watched with --video")
        found.append((one, path))
    return found


def write_evidence_frames(
    videos: StateVideos, answer: Answer, session: Session, folder: Path
) -> list[str]:
    """Write a frame of each step of an answer's spans; return their paths, by time: of the stream,
    and of the video where that differs.
    """
    from PIL import Image

    from protokv.state.sources import find_video_place
    from protokv.video import open_source

    step_s = session.clock.step_seconds
    paths = list[str]()
    spans = answer.evidence.spans if answer.evidence else ()
    steps = {
        i
        for one in spans
        for i in range(round(one.start_s / step_s), round(one.end_s / step_s))[:_MOST_FRAMES]
    }
    folder.mkdir(parents=True, exist_ok=True)
    known = [place for place, _ in videos]
    for time_s in (i * step_s for i in sorted(steps)):
        place, file = [one for one in videos if one[0].start_s <= time_s][-1]
        in_file_s = place.video_time(time_s)
        with open_source(str(file)) as source:
            frame = next(iter(source.frames(in_file_s)), None)
        if frame is None:
            raise SourceUnreadable(f"{file} has no frame at {in_file_s:g} s")
        # Names sort by time.
        name = _format_stamp(time_s)
        if find_video_place(known, time_s) is not None:
            name += f"_{Path(place.name).stem}_{_format_stamp(in_file_s)}"
        paths.append(str(folder / f"{name}.png"))
        Image.fromarray(frame.image).save(paths[-1])
    return paths


def _format_stamp(time_s: float) -> str:
    minutes, rest = divmod(round(time_s * 1000), 60_000)
    return f"{minutes // 60:02d}-{minutes % 60:02d}-{rest / 1000:06.3f}"
