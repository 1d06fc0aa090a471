"""`query --frames`: the frames of the video at the times that an answer stood on, as PNG.

A state is untrusted and holds no folder: the user says where the video is. A file counts only if its bytes have the
fingerprint in the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from protokv.errors import SourceNotFound, SourceUnreadable, StateMismatch, shown

if TYPE_CHECKING:
    from protokv.core.session import Answer, Session
    from protokv.state.reader import Reader

# Of one span; a longer one is shown at evenly spaced steps.
MOST_FRAMES = 8
_HINT = "name the file, or the folder it is in, with --video"


class FrameWriter:
    """Writes the frames of a state's videos at the spans of an answer."""

    def __init__(self, reader: Reader, folder: Path, video: Path | None) -> None:
        """Find the videos in `video`, beside the state or in this folder, before a model is loaded.

        Raises:
            SourceError, StateMismatch: a video is not at hand, or has changed.
        """
        from protokv.state.sources import source_records

        places = [video] if video is not None else [Path(), Path(str(reader.path)).parent]
        records = source_records(reader.header)
        starts_s = [float(one.get("start_s") or 0.0) for one in records]
        ends = pairwise([*starts_s, reader.header.clock.stream_time_s])
        # Stream time of a video's begin and end, its file, and where in the file it begins.
        self._videos = [(*span, *_find(one, places)) for one, span in zip(records, ends, strict=True)]
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, answer: Answer, session: Session) -> list[str]:
        """Write the frames of an answer with evidence; return their paths, by time."""
        from PIL import Image

        from protokv.video import open_source

        step_s, times, paths = session.clock.step_seconds, list[float](), []
        for one in answer.evidence.spans if answer.evidence else ():
            count = max(1, round((one.end_s - one.start_s) / step_s))
            most = min(count, MOST_FRAMES)
            times += [one.start_s + (i * count // most) * step_s for i in range(most)]
        for time_s in sorted(times):
            start_s, _, file, offset_s = next((one for one in self._videos if time_s < one[1]), self._videos[-1])
            in_file_s = time_s - start_s + offset_s
            with open_source(str(file)) as source:
                frame = next(iter(source.frames(in_file_s)), None)
            if frame is None:
                raise SourceUnreadable(f"{file} has no frame at {in_file_s:g} s")
            # Names sort by time, such as `00-07-02.500`.
            minutes, rest = divmod(round(time_s * 1000), 60_000)
            name = f"{minutes // 60:02d}-{minutes % 60:02d}-{rest // 1000:02d}.{rest % 1000:03d}.png"
            paths.append(str(self._folder / name))
            Image.fromarray(frame.image).save(paths[-1])
        return paths


def _find(record: Mapping[str, Any], places: list[Path]) -> tuple[Path, float]:
    """Return the file of the record of a source, and the time in it at which the source begins."""
    from protokv.video.file import fingerprint

    # The fingerprint of a part of a file is that of the file, then @ and where the part begins.
    digest, _, part = str(record.get("fingerprint")).partition("@")
    name, size = str(record.get("name")), record.get("size_bytes")
    if record.get("kind") != "file" or not isinstance(size, int):
        raise SourceNotFound(f"there is no video file of this state: it watched {shown(name)}")
    name = PurePath(name.rpartition(" from ")[0] if part else name).name
    path = next((one for place in places for one in (place, place / name) if one.is_file()), None)
    if path is None:
        where = " or ".join(dict.fromkeys(map(str, places)))
        raise SourceNotFound(f"the video {shown(name)} of this state is not at hand: it is not in {where}", hint=_HINT)
    if path.stat().st_size != size or fingerprint(path, size) != digest:
        raise StateMismatch(f"{path} is not the video that this state watched, or has changed since", hint=_HINT)
    return path, float(part.partition("+")[0] or 0.0)
