"""`query --frames`: the frames of the video at the times that an answer stood on, as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protokv.state.frames import StateVideos
    from protokv.stream.answer import Answer
    from protokv.stream.session import Session

_MOST_FRAMES = 8  # of one span: its first ones


def write_evidence_frames(
    videos: StateVideos, answer: Answer, session: Session, folder: Path
) -> list[str]:
    """Write a frame of each step of an answer's spans; return their paths, by time: of the stream,
    and of the video where that differs.
    """
    from PIL import Image

    from protokv.state.frames import read_frame
    from protokv.state.sources import find_video_place

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
        place, image = read_frame(videos, time_s)
        # Names sort by time.
        name = _format_stamp(time_s)
        if find_video_place(known, time_s) is not None:
            name += f"_{Path(place.name).stem}_{_format_stamp(place.video_time(time_s))}"
        paths.append(str(folder / f"{name}.png"))
        Image.fromarray(image).save(paths[-1])
    return paths


def _format_stamp(time_s: float) -> str:
    minutes, rest = divmod(round(time_s * 1000), 60_000)
    return f"{minutes // 60:02d}-{minutes % 60:02d}-{rest / 1000:06.3f}"
