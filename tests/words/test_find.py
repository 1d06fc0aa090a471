"""Which subtitles an ingest takes, what the state keeps of them, and what it does if they are bad
or change.
"""

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import protokv
from protokv.core.backbone import Backbone
from protokv.errors import ConfigError, SourceNotFound, StateMismatch
from protokv.ingestion import IngestStarted, IngestSummary, WordsLost, ingest_events
from protokv.state.reader import StateReader, load_state
from protokv.video import open_source
from protokv.words.find import find_subtitles
from tests.core.streams import same
from tests.mock_backbone import MockBackbone
from tests.state.test_checkpoint import CONFIGS
from tests.video.test_stream import piped
from tests.words.subtitled import write_subtitled
from tests.words.test_transcript import transcript_of

SRT = "1\n00:00:01,000 --> 00:00:02,000\n{}\n"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("clip")
    said = [(1.0, 2.0, "a track")]
    return write_subtitled(folder / "x.mkv", {"ger": said, "eng": said}, seconds=3).read_bytes()


@pytest.fixture
def video(clip: bytes, tmp_path: Path) -> Path:
    (tmp_path / "talk.mkv").write_bytes(clip)
    return tmp_path / "talk.mkv"


def watch(
    source: Path | str, subtitles: str = "auto", state: Path | None = None, **options: Any
) -> dict[type, Any]:
    """Ingest; return the last event of each type."""
    state = state or Path(source).with_suffix(".safetensors")
    options = {"backbone": MockBackbone(), "subtitles": subtitles, **options}
    return {
        type(event): event for event in ingest_events(source, state, CONFIGS["durable"], **options)
    }


def source_of(state: Path) -> Mapping[str, Any]:
    """The record of the source of a state."""
    source = StateReader.open(state).header.source
    assert source is not None
    return source


def found(video: Path, choice: str = "auto") -> str | None:
    with open_source(video) as source:
        words = find_subtitles(source, video, choice)
    return words.between(0, 9)[0] if words.record else None


def test_a_file_beside_the_video_comes_before_a_track_and_the_plain_name_and_english_before_others(
    video: Path,
) -> None:
    assert found(video) == found(video, "en") == found(video, "deu") == "a track"
    for name in (
        "talk.de.vtt",
        "talk.en.srt",
        "talk.srt",
        "talks.srt",
        "talk.part2.srt",
        "other.ASS",
    ):
        text = ("WEBVTT\n\n" if ".vtt" in name else "") + SRT.format(name).replace(",", ".")
        video.with_name(name).write_text(text)
        if name == "talk.de.vtt":
            assert found(video) == name
    others = video.with_name("talks.srt")
    choices = {
        "auto": "talk.srt",
        "en-GB": "talk.en.srt",
        "en_US": "talk.en.srt",
        "ger": "talk.de.vtt",
        "off": None,
    }
    assert {choice: found(video, choice) for choice in choices} == choices
    assert found(video, str(others)) == others.name
    with pytest.raises(SourceNotFound, match="no subtitles in fr") as caught:
        found(video, "fr")
    assert "de, en" in caught.value.hint
    with pytest.raises(SourceNotFound, match=r"no subtitles at .*no\.srt"):
        found(video, "no.srt")


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (("en.forced", "en"), "en"),
        (("en.sdh", "de", "en.default"), "en.default"),
        (("pt_BR", "es-419"), "es-419"),
        (("eng.cc", "bak", "orig", "part2"), "eng.cc"),
        # The track in the container has all that is said.
        (("bak", "new", "mkv"), "a track"),
        (("en.forced",), "a track"),
    ],
)
def test_full_subtitles_come_first_and_a_backup_is_no_language(
    names: tuple[str, ...], meant: str, video: Path
) -> None:
    for name in names:
        video.with_suffix(f".{name}.srt").write_text(SRT.format(name))
    assert found(video) == meant
    assert found(video, str(video.with_suffix(f".{names[0]}.srt"))) == names[0]


def test_a_state_names_its_subtitles_and_has_the_same_bytes_without_them(
    video: Path, tmp_path: Path
) -> None:
    state = video.with_suffix(".safetensors")
    assert watch(video)[IngestStarted].words == "text track 1 (ger)"
    assert source_of(state)["words"]["kind"] == "track"
    watch(video, "off", overwrite=True)
    assert "words" not in source_of(state)
    (tmp_path / "talk.srt").write_text(SRT.format("beside"))
    assert watch(video, overwrite=True)[IngestStarted].words == "talk.srt"
    assert watch(video)[IngestStarted].how == "finished"
    for change in (SRT.format("changed"), None):
        (tmp_path / "talk.srt").write_text(change) if change else (tmp_path / "talk.srt").unlink()
        with pytest.raises(StateMismatch, match=r"talk\.srt"):
            watch(video)


def test_a_guess_at_an_encoding_is_said_with_the_name(video: Path, tmp_path: Path) -> None:
    (tmp_path / "talk.srt").write_bytes(SRT.format("caf\xe9").encode("cp1252"))
    for how in ("started", "finished"):
        events = watch(video)
        assert events[IngestStarted].how == how
        assert events[IngestStarted].words == "talk.srt (read as cp1252, which is a guess)"
        assert WordsLost not in events


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "holds no subtitles"),
        (SRT.format("[music]").encode(), "no line of them says anything"),
    ],
)
def test_bad_subtitles_are_news_and_the_video_is_watched_all_the_same(
    content: bytes, why: str, video: Path
) -> None:
    video.with_suffix(".srt").write_bytes(content)
    for how in ("started", "finished"):
        events = watch(video)
        assert events[IngestStarted].how == how
        assert events[WordsLost].words == "talk.srt"
        assert why in events[IngestSummary].words_lost
        assert events[IngestSummary].complete
    # They take no room in the memory.
    state = video.with_suffix(".safetensors")
    bad = load_state(state)
    watch(video, "off", overwrite=True)
    assert bad.memory == load_state(state).memory
    assert same(bad.tensors, load_state(state).tensors)


def test_a_run_in_parts_hears_what_a_whole_run_hears(
    video: Path, tiny: Backbone, tmp_path: Path
) -> None:
    whole, parts = (tmp_path / f"{name}.safetensors" for name in ("whole", "parts"))
    watch(video, "en", whole, backbone=tiny)
    asked = count()
    watch(video, "en", parts, backbone=tiny, should_stop=lambda: next(asked) > 3)
    assert not StateReader.open(parts).header.complete
    watch(video, "en", parts, backbone=tiny)
    assert parts.read_bytes() == whole.read_bytes()
    session = protokv.load(whole, tiny)
    assert [line.text for line in transcript_of(session).lines] == ["a track"]


def test_a_state_without_words_takes_none_later_and_says_so(
    video: Path, tiny: Backbone, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    watch(video, "off", path, backbone=tiny)
    silent = path.read_bytes()
    longer = write_subtitled(tmp_path / "longer.mkv", {"eng": [(1.0, 2.0, "late")]}, seconds=4)
    with pytest.raises(ConfigError, match="began without words"):
        watch(longer, state=path, backbone=tiny, append=True)
    assert path.read_bytes() == silent
    # A stream has no words of its own, and may have those of a file.
    with (
        piped(longer.read_bytes()) as address,
        pytest.raises(SourceNotFound, match="no subtitles in en"),
    ):
        watch(address, "en", state=path, backbone=tiny, append=True)
    with piped(longer.read_bytes()) as address:
        assert (
            watch(address, state=path, backbone=tiny, append=True)[IngestSummary].words_lost == ""
        )
    longer.with_suffix(".srt").write_text(SRT.format("a file"))
    with piped(longer.read_bytes()) as address:
        watch(
            address, str(longer.with_suffix(".srt")), tmp_path / "piped.safetensors", backbone=tiny
        )
    assert [
        line.text
        for line in transcript_of(protokv.load(tmp_path / "piped.safetensors", tiny)).lines
    ] == ["a file"]
