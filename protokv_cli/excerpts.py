"""`query --frames` and `--clip`: the video at the times that an answer stood on, as pictures and as a clip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protokv.errors import ConfigError, ProtoKVError
from protokv_cli.output import Output
from protokv_cli.tables import time_text

if TYPE_CHECKING:
    from protokv.core.parts import Moment
    from protokv.core.session import Answer, Session
    from protokv.state.snapshot import Header

# Of one moment; a longer one is shown at evenly spaced steps.
MOST_FRAMES = 8

# A clip begins this much before the moment and ends this much after it.
AROUND_S = 2.0
LONGEST_CLIP_S = 60.0


class Excerpts:
    """Writes what a state's video shows at the moments of an answer."""

    def __init__(
        self, out: Output, state: str, header: Header, *, frames: Path | None, clip: Path | None, video: Path | None
    ) -> None:
        """Find the videos now, before a model is loaded.

        Raises:
            SourceError, StateMismatch: a video is not at hand, or has changed.
            ConfigError: the clip is no .mp4, or would replace the video.
        """
        from protokv.state.api import check_not_read
        from protokv.state.form import is_url
        from protokv.state.original import find_originals

        self._out, self._frames, self._clip = out, frames, clip
        if clip is not None and clip.suffix != ".mp4":
            raise ConfigError(f"a clip is an .mp4, and {clip} is not", hint="for example --clip out.mp4")
        here = [Path(), *(() if is_url(state) else (Path(state).parent,))]
        places = here if video is None else [video]
        self._originals = find_originals(
            header, places, hint="name the file, or the folder it is in, with --video", grown=True
        )
        if clip is not None:
            check_not_read(clip, state, *(one.path for one in self._originals))
        if frames is not None:
            with _writing(frames):
                frames.mkdir(parents=True, exist_ok=True)

    def write(self, answer: Answer, session: Session) -> dict[str, Any]:
        """Write those of an answer with evidence; return their paths for its row."""
        moments = answer.evidence.moments if answer.evidence else ()
        row: dict[str, Any] = {}
        if self._frames is not None:
            times_s = sorted(time_s for one in moments for time_s in _shown(one, session.clock.step_seconds))
            row["frames"] = [str(path) for path in self._write_frames(times_s, self._frames)]
            self._out.note(f"{len(times_s)} frames are in {self._frames}")
        if self._clip is not None:
            row["clip"] = str(self._clip) if moments else None
            self._out.note(self._write_clip(moments[0]) if moments else "no moment stands out, so there is no clip")
        return row

    def _write_frames(self, times_s: list[float], folder: Path) -> Iterator[Path]:
        from protokv.state.original import original_at
        from protokv.video import open_source
        from protokv.video.excerpt import write_frame

        for original, times in groupby(times_s, lambda time_s: original_at(self._originals, time_s)):
            with open_source(original.path, isolate=True) as source:
                for time_s in times:
                    path = folder / f"{_name(time_s)}.png"
                    with _writing(path):
                        write_frame(source, original.time_in_file(time_s), path)
                    yield path

    def _write_clip(self, moment: Moment) -> str:
        from protokv.state.original import original_at
        from protokv.video import open_source
        from protokv.video.excerpt import write_clip

        assert self._clip is not None
        original = original_at(self._originals, moment.start_s)
        start_s = max(original.start_s, moment.start_s - AROUND_S)
        end_s = min(original.end_s, moment.end_s + AROUND_S, start_s + LONGEST_CLIP_S)
        times = original.time_in_file(start_s), original.time_in_file(end_s)
        with _writing(self._clip), open_source(original.path, isolate=True) as source:
            how = write_clip(source, original.path, *times, self._clip)
        return f"{self._clip} shows {time_text(start_s)} to {time_text(end_s)} ({how})"


def _shown(moment: Moment, step_s: float) -> list[float]:
    """Return the times of the steps of a moment, at most `MOST_FRAMES`, evenly spaced."""
    count = max(1, round((moment.end_s - moment.start_s) / step_s))
    shown = min(count, MOST_FRAMES)
    return [moment.start_s + (i * count // shown) * step_s for i in range(shown)]


def _name(time_s: float) -> str:
    """Return a file name that sorts by time, such as `00-07-02.500`."""
    milliseconds = round(time_s * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}-{minutes % 60:02d}-{rest // 1000:02d}.{rest % 1000:03d}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProtoKVError(f"cannot write {path}: {error.strerror or error}", hint="name another place") from error
