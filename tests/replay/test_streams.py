"""Video files as streams, with the questions about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from protokv.errors import ConfigError, SourceUnreadable
from protokv.replay.questions import Question
from protokv.replay.streams import FileStream, open_files

SAMPLE = Path(__file__).parents[2] / "samples" / "short" / "video.mp4"


def test_questions_go_to_the_video_that_they_name(tmp_path: Path) -> None:
    other = tmp_path / "other.mp4"
    other.write_bytes(SAMPLE.read_bytes())
    file = tmp_path / "q.jsonl"
    file.write_text(
        '{"question": "A?", "answer": "a", "ask_s": 1, "video": "other"}\n'
        '{"question": "B?", "answer": "b", "ask_s": 1, "video": "video.mp4"}\n'
    )
    streams = open_files([SAMPLE, other], file)
    assert [[question.text for question in stream.questions] for stream in streams] == [["B?"], ["A?"]]
    with pytest.raises(ConfigError, match="about other, which is none"):
        open_files([SAMPLE], file)
    file.write_text('{"question": "A?", "answer": "a", "ask_s": 1}\n')
    with pytest.raises(ConfigError, match="names no video"):
        open_files([SAMPLE, other], file)
    assert len(open_files([SAMPLE], file)[0].questions) == 1


def test_a_file_that_is_no_video_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "x.mp4").write_text("not a video")
    with pytest.raises(SourceUnreadable):
        FileStream(tmp_path / "x.mp4", [Question("1", "A?", "a", "", 0.0, "query")])
