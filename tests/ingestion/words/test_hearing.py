"""What is heard in a video without subtitles enters the stream when it is said, in parts as in a whole run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protokv
from protokv.backbones import speech
from protokv.backbones.base import Backbone
from protokv.errors import ConfigError, SourceUnreadable, StateMismatch
from protokv.ingestion import Event, Started, Summary, WordsLost, ingest
from protokv.ingestion.words.find import words_of
from protokv.storage import api as storage
from protokv.video import open_source
from protokv.video.source import Line, Sound, Source
from tests.ingestion.words.test_find import SRT
from tests.storage.test_checkpoint import CONFIGS
from tests.video.sounding import write_sounding
from tests.video.subtitled import write_subtitled

BURSTS = [(1.0, 1.5), (3.0, 3.5), (5.25, 6.0), (8.0, 9.0)]
WORDS = ("one", "two", "three", "blue")


@dataclass
class Counting:
    """Hears a word at each tone, by its time."""

    digest: str = "a"
    rate: int = 8000
    longest_s: float = 3.0
    given: list[Sound] = field(default_factory=list)

    @property
    def record(self) -> Mapping[str, Any]:
        return {"kind": "speech", "name": "counting", "digest": self.digest}

    def __call__(self, sound: Sound) -> Iterator[Line]:
        self.given.append(sound)
        loud = np.flatnonzero(np.abs(sound.samples) > 2000)
        for start in loud[np.diff(loud, prepend=-self.rate) > 400]:
            time_s = sound.start_s + start / self.rate
            for word, (from_s, to_s) in zip(WORDS, BURSTS, strict=True):
                if abs(time_s - from_s) < 0.01:
                    yield Line(time_s, to_s, f"{word} [music]")


@pytest.fixture
def recogniser(monkeypatch: pytest.MonkeyPatch) -> Counting:
    found = Counting()
    monkeypatch.setattr(speech, "load_recogniser", lambda *_: found)
    return found


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_sounding(tmp_path_factory.mktemp("clip") / "talk.mkv", BURSTS, 10).read_bytes()


@pytest.fixture
def video(clip: bytes, tmp_path: Path) -> Path:
    (tmp_path / "talk.mkv").write_bytes(clip)
    return tmp_path / "talk.mkv"


def watch(video: Path, backbone: Backbone, state: str = "a", **options: Any) -> dict[type, Event]:
    path = video.parent / f"{state}.safetensors"
    events = ingest(video, path, CONFIGS["durable"], backbone=backbone, transcribe="counting", **options)
    return {type(event): event for event in events}


def said(video: Path, backbone: Backbone, state: str = "a") -> list[tuple[float, str]]:
    lines = protokv.load(video.parent / f"{state}.safetensors", backbone).parts.transcript.lines
    return [(line.start_s, line.text) for line in lines]


def test_what_is_heard_enters_the_step_in_which_it_is_said(video: Path, tiny: Backbone, recogniser: Counting) -> None:
    started = watch(video, tiny)[Started]
    assert (started.words, started.transcribed) == ("speech, as counting hears it", True)
    assert said(video, tiny) == [(1.0, "one"), (3.0, "two"), (5.0, "three"), (8.0, "blue")]
    record = storage.read_header(video.parent / "a.safetensors").source["words"]
    assert record == {"kind": "speech", "name": "counting", "digest": "a"}
    # No more sound is read than what was watched needs.
    recogniser.given.clear()
    with open_source(video) as source:
        words: Any = words_of(source, video, "auto", recogniser=recogniser)
        assert words.between(0, 2) == ["one"]
    assert recogniser.given[-1].end_s <= 3.0


def test_a_run_in_parts_hears_what_a_whole_run_hears_and_no_more(
    video: Path, tiny: Backbone, recogniser: Counting
) -> None:
    watch(video, tiny, "whole")
    asked = count()
    watch(video, tiny, "parts", should_stop=lambda: next(asked) > 12)
    stopped_s = storage.read_header(video.parent / "parts.safetensors").clock.stream_time_s
    assert 0 < stopped_s < 10
    recogniser.given.clear()
    assert watch(video, tiny, "parts")[Summary].complete
    assert min(one.end_s for one in recogniser.given) > stopped_s
    whole, parts = (video.parent / f"{name}.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    recogniser.digest = "another"
    with pytest.raises(StateMismatch, match="as counting hears it has changed"):
        watch(video, tiny, "parts")


@pytest.mark.slow
def test_an_append_tells_that_another_model_heard_what_was_before(
    video: Path, tmp_path: Path, tiny: Backbone, recogniser: Counting
) -> None:
    watch(video, tiny)
    other = write_sounding(tmp_path / "other.mkv", BURSTS[:1], 3)
    same = watch(other, tiny, append=True)[Started]
    assert (same.how, same.words) == ("appended", "speech, as counting hears it")
    recogniser.digest = "b"
    third = write_sounding(tmp_path / "third.mkv", BURSTS[1:2], 4)
    told = "speech, as counting hears it; before: speech, as counting hears it"
    assert watch(third, tiny, append=True)[Started].words == told
    assert said(video, tiny)[-2:] == [(11.0, "one"), (16.0, "two")]


def test_subtitles_come_first_unless_they_are_off(video: Path, tiny: Backbone, recogniser: Counting) -> None:
    video.with_suffix(".srt").write_text(SRT.format("two three"))
    assert watch(video, tiny)[Started].words == "talk.srt"
    assert not recogniser.given
    assert "counting" in str(watch(video, tiny, "b", subtitles="off")[Started].words)
    assert "counting" in str(watch(video, tiny, "c", subtitles="fr")[Started].words)


def test_a_video_without_sound_or_with_a_bad_track_is_watched_all_the_same(
    tmp_path: Path, video: Path, tiny: Backbone, recogniser: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = watch(write_subtitled(tmp_path / "silent.mkv", {}, seconds=3), tiny, "silent")
    assert (events[WordsLost].why, events[Summary].complete) == ("the video has no sound", True)

    def breaks(*_: object) -> Iterator[Sound]:
        yield from whole[:1]
        raise SourceUnreadable("the sound is damaged: no")

    with open_source(video) as source:
        whole = list(source.sound(recogniser.rate, recogniser.longest_s))
    monkeypatch.setattr("protokv.video.pyav_source.PyAVSource.sound", breaks)
    events = watch(video, tiny, "broken")
    assert (events[Summary].words_lost, events[Summary].complete) == ("the sound is damaged: no", True)
    assert [text for _, text in said(video, tiny, "broken")] == ["one"]


def test_a_stream_is_not_transcribed(recogniser: Counting, video: Path) -> None:
    class Stream(Source):
        info, texts_come, damage = open_source(video).info, True, None  # type: ignore[assignment]

        def _read(self, wanted: object) -> Any: ...

    with pytest.raises(ConfigError, match="is a stream, and --transcribe is for files"):
        words_of(Stream(), None, "auto", recogniser=recogniser)  # type: ignore[arg-type]
