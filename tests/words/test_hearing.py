"""What is heard in a video without subtitles enters the stream when it is said, in parts as in a whole run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import protokv
from protokv.core.backbone import Backbone
from protokv.errors import SourceUnreadable, StateMismatch
from protokv.ingestion import Event, LiveOptions, Started, Summary, WordsLost, ingest
from protokv.state import api as storage
from protokv.video import open_source, stream
from protokv.video.source import Line, Sound, Source
from protokv.video.stream import StreamSource
from protokv.words import speech
from protokv.words.find import words_of
from tests.state.test_checkpoint import CONFIGS
from tests.video.sounding import write_sounding
from tests.video.subtitled import write_subtitled
from tests.video.test_stream import piped, served
from tests.words.test_find import SRT

BURSTS = [(1.0, 1.5), (3.0, 3.5), (5.25, 6.0), (8.0, 9.0)]
WORDS = ("one", "two", "three", "blue")
HEARD = [(1.0, "one"), (3.0, "two"), (5.0, "three"), (8.0, "blue")]


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


def watch(video: Path, backbone: Backbone, state: str = "a", source: Any = None, **options: Any) -> dict[type, Event]:
    path = video.parent / f"{state}.safetensors"
    events = ingest(source or video, path, CONFIGS["durable"], backbone=backbone, transcribe="counting", **options)
    return {type(event): event for event in events}


def said(video: Path, backbone: Backbone, state: str = "a") -> list[tuple[float, str]]:
    lines = protokv.load(video.parent / f"{state}.safetensors", backbone).parts.transcript.lines
    return [(line.start_s, line.text) for line in lines]


def test_what_is_heard_enters_the_step_in_which_it_is_said(video: Path, tiny: Backbone, recogniser: Counting) -> None:
    started = watch(video, tiny)[Started]
    assert (started.words, started.transcribed) == ("speech, as counting hears it", True)
    assert said(video, tiny) == HEARD
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
    silent = write_subtitled(tmp_path / "silent.mkv", {}, seconds=3)
    with piped(silent.read_bytes()) as address:
        for source in (silent, address):
            events = watch(silent, tiny, "silent", source=source, overwrite=True)
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


@contextmanager
def offered(video: Path, how: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the address of a video that comes in a pipe, from a server or in a file that grows, and its options."""
    if how == "pipe":
        with piped(video.read_bytes()) as address:
            yield address, {}
    elif how == "server":
        with served(video.parent) as address:
            yield f"{address}/{video.name}", {}
    else:
        yield str(video), {"live": LiveOptions(follow=True, stall_s=0.3)}


@pytest.mark.parametrize("how", ["pipe", "server", pytest.param("growing", marks=pytest.mark.slow)])
def test_a_stream_that_waits_is_heard_as_the_file_is_in_parts_too(
    how: str, video: Path, tiny: Backbone, recogniser: Counting
) -> None:
    with offered(video, how) as (source, options):
        events = watch(video, tiny, "whole", source=source, **options)
        assert events[Started].words == "speech, as counting hears it"
        assert (said(video, tiny, "whole"), events[Summary].words_lost) == (HEARD, "")
        if how == "pipe":
            return
        asked = count()
        watch(video, tiny, "parts", source=source, should_stop=lambda: next(asked) > 12, **options)
        stopped_s = storage.read_header(video.parent / "parts.safetensors").clock.stream_time_s
        assert 0 < stopped_s < 10
        recogniser.given.clear()
        watch(video, tiny, "parts", source=source, **options)
    assert min(one.end_s for one in recogniser.given) > stopped_s
    whole, parts = (video.parent / f"{name}.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_sound_that_nothing_waits_for_comes_in_short_pieces_when_they_are_complete(
    video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LIVE_S", 2.0)
    with piped(video.read_bytes()) as address, StreamSource(address, timeout_s=5.0, sound=(8000, 3.0)) as source:
        came = [(frame.time_s, [one for _, one in source.heard()]) for frame in source.frames(fps=1.0)]
        came.append((11.0, [one for _, one in source.heard()]))
    pieces = [one for _, some in came for one in some]
    assert all(isinstance(one, Sound) and one.end_s - one.start_s <= 2.0 for one in pieces)
    assert sum(sum(abs(one.samples) > 2000) for one in pieces) == pytest.approx(8000 * 2.75 * 0.8, rel=0.1)
    assert all(time_s >= one.end_s for time_s, some in came for one in some)


class Late(Source):
    """A stream whose sound comes when the test says."""

    texts_come, unheard = True, ""
    info = damage = None  # type: ignore[assignment]
    came: tuple[Sound, ...] = ()

    def heard(self) -> Any:
        found, self.came = self.came, ()
        return [(1, one) for one in found]

    def _read(self, wanted: object) -> Any: ...


def test_what_is_heard_late_enters_the_next_step_and_what_cannot_be_heard_is_said() -> None:
    def recogniser(sound: Sound) -> list[Line]:
        if sound.start_s == 4.0:
            raise RuntimeError("out of memory\nwhile hearing")
        return [Line(sound.start_s, sound.end_s, f"word {sound.start_s:.0f}")]

    def piece(start_s: float) -> Sound:
        return Sound(start_s, 10, np.zeros(10, np.int16))

    recogniser.record, source = {"kind": "speech", "name": "a"}, Late()  # type: ignore[attr-defined]
    words: Any = words_of(source, None, "auto", recogniser=recogniser)  # type: ignore[arg-type]
    source.came = (piece(1.0), piece(5.0))  # an earlier run has heard the first
    assert words.between(2.0, 3.0) == []
    source.came = (piece(2.0), piece(3.0))
    assert words.between(3.0, 5.0) == ["word 2", "word 3"]
    assert (words.between(5.0, 6.0), words.lost) == (["word 5"], None)
    for why, start_s in (("too slow, sound is left out at 100 s", 100.0), ("RuntimeError: out of memory", 60.0)):
        words.lost, source.came = None, (piece(4.0),)
        assert words.between(start_s, start_s + 1) == []
        assert words.lost.endswith(why)
    words.lost, source.unheard = None, "the video has no sound"
    assert (words.between(110.0, 111.0), words.lost) == ([], source.unheard)
