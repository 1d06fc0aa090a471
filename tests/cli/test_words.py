"""Asking for what was said: the words beside an answer's spans, and the transcript of a state."""

import shutil
from pathlib import Path

import pytest

from protokv.words import transcript
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, Watch
from tests.cli.terminal import run_on_terminal

SHORT = Path(__file__).parents[2] / "samples" / "short" / "video.mp4"
STATE = "talk.safetensors"
SRT = """1
00:00:03,600 --> 00:00:05,000
Mara: the bar is \x1b[31mmine\u202e

2
00:00:06,600 --> 00:00:08,000
this cross was green
"""


@pytest.fixture(scope="module")
def protokv(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program beside the short sample with a voice, watched by the embedded model with a commit
    every second.
    """
    program = Program(tmp_path_factory.mktemp("talk"), Path("protokv/mini"))
    shutil.copy(SHORT, program.folder / "talk.mp4")
    (program.folder / "talk.srt").write_text(SRT)
    done = program(
        "ingest",
        program.folder / "talk.mp4",
        "-o",
        program.folder / STATE,
        "--every",
        "1s",
        "--keep",
        "20",
    )
    assert done.code == 0, done.err
    return program


@pytest.fixture(scope="module")
def talk(protokv: Program) -> Path:
    return protokv.folder / STATE


def test_one_session_tells_what_was_said_about_a_thing_and_what_was_shown_when_it_was_said(
    protokv: Program, talk: Path
) -> None:
    about, whose = protokv(
        "query", talk, "Where was the bar?", "Where was the cross?", "--evidence"
    ).rows()
    assert (about["answer"], whose["answer"]) == ("bottom right", "right")
    assert "Mara: the bar is [31mmine" in [
        one["text"] for span in about["evidence"] for one in span["words"]
    ]
    for wanted, thing in (("Mara", "bar"), ("green", "cross")):
        (said,) = [
            row for row in protokv("inspect", talk, "--words").rows() if wanted in row["text"]
        ]
        (now,) = protokv(
            "query", talk, "--at", said["end_s"], "What is visible now?", "--json"
        ).rows()
        assert now["answer"] == thing


def test_the_transcript_is_printed_in_every_form_and_never_obeyed(
    protokv: Program, talk: Path
) -> None:
    rows = [
        {"start_s": 3.6, "end_s": 5.0, "text": "Mara: the bar is [31mmine"},
        {"start_s": 6.6, "end_s": 8.0, "text": "this cross was green"},
    ]
    assert protokv("inspect", talk, "--words").rows() == rows
    assert protokv("inspect", talk, "--words", "--at", "0:06").rows() == rows[:1]
    seen = run_on_terminal(protokv.environment, "inspect", talk, "--words")
    assert seen.lines()[1].split(maxsplit=1) == ["0:03.6", rows[0]["text"]]
    assert "\x1b[31mmine" not in seen.screen
    early = protokv("inspect", talk, "--words", "--at", "0:03")
    assert (early.code, early.out) == (ExitCode.DONE, "")
    assert "no words of talk.srt are known" in early.err


def test_a_state_that_cannot_tell_what_was_said_says_why(
    protokv: Program, watched: Watch, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no words: the video had none" in protokv("inspect", watched(), "--words").err
    monkeypatch.setattr(transcript, "MOST_TRANSCRIPT_BYTES", transcript.MOST_TRANSCRIPT_LINE_BYTES)
    assert "older lines may be gone" in protokv("inspect", talk, "--words").err


def test_a_dry_run_says_which_words_would_be_read_and_what_of_them_cannot(
    protokv: Program, tmp_path: Path
) -> None:
    dry_run = ("ingest", protokv.folder / "talk.mp4", "--dry-run", "--json", "--subtitles")
    (tmp_path / "bad.srt").write_bytes(b"\0\1junk")
    (row,), (bare,), (bad,) = (
        protokv(*dry_run, named).rows() for named in ("auto", "off", tmp_path / "bad.srt")
    )
    assert (row["words"], row["words_lost"], bare["words"]) == ("talk.srt", "", None)
    assert row["tokens"] > bare["tokens"]
    assert bad["words_lost"] == "bad.srt holds no subtitles"
