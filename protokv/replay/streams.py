"""Streams to replay and the questions about them: the interface, and video files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from protokv.errors import ConfigError, SourceUnreadable
from protokv.replay.questions import ReplayQuestion, load_questions
from protokv.texts import JsonObject
from protokv.video import VideoStep, open_source, read_steps
from protokv.words.find import SUBTITLES_OFF, find_subtitles, identify_subtitles


class ReplayStream(ABC):
    """Something to watch, and what to ask about it."""

    name: str  # as it stands in the results
    length_s: float  # seconds of stream time
    facts: JsonObject  # everything that decides its frames, as plain JSON values
    questions: Sequence[ReplayQuestion]
    has_words: bool = False  # it may have subtitles

    @abstractmethod
    def steps(self, fps: float, frames_per_step: int) -> Iterator[VideoStep]:
        """Yield its steps in order."""

    def words(self, start_s: float, end_s: float) -> Sequence[str]:
        """Return the subtitles of a step [start_s, end_s); none by default. Steps are asked for
        once, in order.
        """
        return []


class VideoFileStream(ReplayStream):
    """A video file."""

    def __init__(
        self, path: str | Path, questions: Sequence[ReplayQuestion], subtitles: str = SUBTITLES_OFF
    ) -> None:
        """Open the file to learn its length, and read the subtitles that enter the stream
        (`find_subtitles`), if any.

        SourceError: it or its subtitles cannot be read, or it says no length or has none in the
        wanted language.
        """
        self._path = path
        with open_source(path) as source:
            info = source.info
            if info.duration_s is None:
                raise SourceUnreadable(
                    f"{path} does not say how long it is", hint="remux it: ffmpeg -i IN -c copy OUT"
                )
            self.name = info.name
            self.length_s = info.duration_s
            self.facts = {"size_bytes": info.size_bytes, "fingerprint": info.fingerprint}
            self._words = find_subtitles(source, Path(path), subtitles)
        if self._words.record:
            if self._words.lost:
                raise SourceUnreadable(f"not all words of {path} are read: {self._words.lost}")
            self.has_words = self._words.has_lines
            self.facts["subtitles"] = identify_subtitles(self._words.record)
        self.questions = questions

    def steps(self, fps: float, frames_per_step: int) -> Iterator[VideoStep]:
        """Read the file once."""
        with open_source(self._path) as source:
            yield from read_steps(source, fps, frames_per_step)

    def words(self, start_s: float, end_s: float) -> Sequence[str]:
        """Return what the subtitles say there."""
        return self._words.between(start_s, end_s)


def open_replay_videos(
    sources: Sequence[str | Path], questions: str | Path, subtitles: str = SUBTITLES_OFF
) -> list[ReplayStream]:
    """Open video files with their questions and subtitles; a row without the name of a video is
    about the only one.

    SourceError: a file is missing or cannot be read. ConfigError: a question is about another
    video, or names none of several.
    """
    own: dict[str, list[ReplayQuestion]] = {str(source): [] for source in sources}
    by_name = {
        name: str(source)
        for source in sources
        for name in (Path(source).name, Path(source).stem, str(source))
    }
    only = next(iter(own)) if len(own) == 1 else None
    for video, question in load_questions(questions):
        source = only if video is None else by_name.get(video)
        if source is None:
            raise ConfigError(
                f"question {question.id} is about {video or 'no video'}, which is none of the "
                "sources",
                hint='name one in its row: "video": "NAME"',
            )
        own[source].append(question)
    return [VideoFileStream(source, found, subtitles) for source, found in own.items()]
