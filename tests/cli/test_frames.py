"""`query --frames`: what the video shows at the times that an answer stood on."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protokv.stream.evidence import Evidence, EvidenceSpan
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, write_video

MOMENTS = (EvidenceSpan(6.0, 8.0, 0.5), EvidenceSpan(1.0, 2.0, 0.2))
QUESTION = "what is first ?"
SMALL = ("--budget", "24", "--json")


@pytest.fixture
def program(
    protokv: Program, mocked: None, video: Path, monkeypatch: pytest.MonkeyPatch
) -> Program:
    """The program beside `clip.mp4` and its state; every answer stands on `MOMENTS`."""
    monkeypatch.setattr("protokv.stream.asking.find_evidence", lambda *_: Evidence(MOMENTS, True))
    shutil.copy(video, protokv.folder)
    assert protokv("ingest", "clip.mp4", *SMALL).code == 0
    return protokv


def differences(path: Path | str, second: int, seed: int = 0) -> float:
    """How far the blocks of a picture are from those that `write_video` drew in a second."""
    drawn = (
        np.random.default_rng([seed, second])
        .integers(0, 256, (4, 6, 3), dtype=np.uint8)
        .astype(float)
    )
    image = np.asarray(Image.open(path), dtype=float).reshape(4, 16, 6, 16, 3).mean((1, 3))
    return float(abs(image - drawn).mean())


def test_the_frames_are_those_of_the_steps_that_the_answer_stood_on(program: Program) -> None:
    (row,) = program("query", "clip.safetensors", QUESTION, "--frames", "seen", "--json").rows()
    assert row["frames"] == [f"seen/00-00-0{second}.000.png" for second in (1, 6, 7)]
    for second, path in zip((1, 6, 7), row["frames"], strict=True):
        assert differences(path, second) < 12 < 40 < differences(path, second + 1)
    # A part of a video, and the second of two, are shown where they are in the whole.
    part = ("--start", "3s", "--duration", "9s", "-o", "part.safetensors")
    assert program("ingest", "clip.mp4", *SMALL, *part).code == 0
    program("query", "part.safetensors", QUESTION, "--frames", "part")
    assert differences("part/00-00-01.000_clip_00-00-04.000.png", 4) < 12
    write_video(program.folder / "two.mp4", 4, seed=5)
    write_video(program.folder / "one.mp4", 6, seed=4)
    for name in ("one.mp4", "two.mp4"):
        assert program("ingest", name, *SMALL, "-o", "both.safetensors", "--append").code == 0
    program("query", "both.safetensors", QUESTION, "--frames", "both")
    assert differences("both/00-00-01.000_one_00-00-01.000.png", 1, seed=4) < 12
    assert differences("both/00-00-07.000_two_00-00-01.000.png", 1, seed=5) < 12


def test_evidence_and_words_of_a_part_have_the_times_of_the_video_beside_those_of_the_stream(
    program: Program,
) -> None:
    Path("clip.srt").write_text("1\n00:00:04,000 --> 00:00:05,000\nhello\n")
    part = ("--start", "3s", "-o", "part.safetensors")
    standing = ("--ask", QUESTION, "--ask-every", "2s", "--evidence")
    rows = program("ingest", "clip.mp4", *SMALL, *part, *standing).rows()
    answered = next(row for row in rows if row["type"] == "answered")
    assert (answered["video"], answered["video_time_s"]) == ("clip.mp4", 5.0)
    assert answered["evidence"][0]["video_start_s"] == answered["evidence"][0]["start_s"] + 3
    (document,) = program("inspect", "part.safetensors", "--json").rows()
    assert document["stream"]["answers"][0]["video_time_s"] == 5.0
    ask = ("query", "part.safetensors", QUESTION, "--evidence")
    (row,) = program(*ask, "--json").rows()
    span = row["evidence"][1]
    assert (span["start_s"], span["video"], span["video_start_s"]) == (1.0, "clip.mp4", 4.0)
    assert "1 to 0:02 (20 %, 0:04 to 0:05 of clip.mp4)" in program(*ask, "-f", "table").out
    (line,) = program("inspect", "part.safetensors", "--words", "--json").rows()
    assert (line["start_s"], line["video_start_s"], line["text"]) == (1.0, 4.0, "hello")
    # A whole video alone has those of the stream.
    (whole,) = program("query", "clip.safetensors", QUESTION, "--evidence", "--json").rows()
    assert not any("video" in span for span in whole["evidence"])


def test_a_video_is_found_where_it_is_named_and_refused_once_it_is_gone_or_changed(
    program: Program,
) -> None:
    ask = ("query", "clip.safetensors", QUESTION, "--frames", "seen")
    (program.folder / "videos").mkdir()
    shutil.move("clip.mp4", "videos/renamed.mp4")
    gone = program(*ask)
    assert (gone.code, gone.out) == (ExitCode.NOT_FOUND, "")
    assert "Error: the video clip.mp4 of this state is not at hand" in gone.err
    assert program(*ask, "--video", "videos/renamed.mp4").code == 0
    shutil.move("videos/renamed.mp4", "videos/clip.mp4")
    assert program(*ask, "--video", "videos").code == 0
    write_video(program.folder / "clip.mp4", 12, seed=1)
    assert program(*ask).code == ExitCode.MISMATCH
