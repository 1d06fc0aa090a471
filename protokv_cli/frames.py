"""`query --frames`: the frames of the video at the times that an answer stood on, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from protokv.errors import SourceNotFound, SourceUnreadable, StateMismatch, escape_text

if TYPE_CHECKING:
    from protokv.state.reader import StateReader
    from protokv.stream.asking import Answer
    from protokv.stream.session import Session

# Where each source begins, in seconds of the stream and of its file, and the file.
StateVideos = Sequence[tuple[float, float, Path]]
_MOST_FRAMES = 8  # of one span: its first ones


def find_state_videos(reader: StateReader, video: Path | None) -> StateVideos:
    """Return the videos of a state.

    A state is untrusted and names no folder. A file in `video`, beside the state or in this folder
    counts if it has the fingerprint in the state. SourceNotFound: it is not at hand. StateMismatch:
    it has changed.
    """
    from protokv.state.sources import list_state_sources
    from protokv.video.registry import fingerprint_video_file

    places = [video] if video else [Path(), Path(str(reader.path)).parent]
    found = []
    for one in list_state_sources(reader.header):
        # The fingerprint of a part is that of the file, then @, where it begins, + and how long it
        # is.
        digest, _, part = str(one.get("fingerprint")).partition("@")
        name = PurePath(str(one.get("name")).rpartition(" from ")[0 if part else 2]).name
        path = next(
            (file for place in places for file in (place, place / name) if file.is_file()), None
        )
        if path is None:
            why = (
                f"the video {escape_text(name)} of this state is not at hand: not in "
                f"{' or '.join(map(str, places))}"
            )
            raise SourceNotFound(why, hint="name the file, or the folder it is in, with --video")
        if fingerprint_video_file(path) != digest:
            why = f"{path} is not the video that this state watched, or has changed since"
            raise StateMismatch(why, hint="name the one that it watched with --video")
        found.append((float(one.get("start_s") or 0.0), float(part.partition("+")[0] or 0.0), path))
    return found


def write_evidence_frames(
    videos: StateVideos, answer: Answer, session: Session, folder: Path
) -> list[str]:
    """Write a frame of each step of an answer's spans; return their paths, by time."""
    from PIL import Image

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
    for time_s in (i * step_s for i in sorted(steps)):
        start_s, in_file_s, file = [one for one in videos if one[0] <= time_s][-1]
        with open_source(str(file)) as source:
            frame = next(iter(source.frames(time_s - start_s + in_file_s)), None)
        if frame is None:
            raise SourceUnreadable(f"{file} has no frame at {time_s - start_s + in_file_s:g} s")
        minutes, rest = divmod(round(time_s * 1000), 60_000)
        # Names sort by time.
        paths.append(
            str(folder / f"{minutes // 60:02d}-{minutes % 60:02d}-{rest / 1000:06.3f}.png")
        )
        Image.fromarray(frame.image).save(paths[-1])
    return paths
