"""Files of questions and videos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protokv.errors import ConfigError, SourceNotFound, SourceUnreadable
from protokv.replay.questions import Question, load_questions
from protokv.replay.streams import ReplayFile, open_files


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_evidence_comes_before_the_query_time_as_reference(tmp_path: Path) -> None:
    file = write(
        tmp_path / "q.jsonl",
        {"question": "Who?", "answer": "Ann", "type": "EPM", "evidence_s": 4, "ask_s": 60, "video": "a.mp4"},
        "",
        {"question": "What?", "answer": "tea", "type": "ASI", "ask_s": 33.5, "id": 7, "lasts": False},
    )
    (video, first), (none, second) = load_questions(file)
    assert (video, first.reference, first.reference_s, first.type) == ("a.mp4", "evidence", 4.0, "EPM")
    assert (none, second.reference, second.reference_s, second.id) == (None, "query", 33.5, "7")
    assert (first.retrospective, second.retrospective) == (True, False)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[1]", "line 2: Expected `object`"),
        ({"question": "Who?", "evidence_s": 1}, "line 2: .* `answer`"),
        ({"question": "Who?", "answer": "Ann"}, "line 2: expected an answer, and evidence_s or ask_s"),
        ({"question": "Who?", "answer": "Ann", "ask_s": "soon"}, "ask_s"),
        ({"question": "Who?", "answer": "Ann", "ask_s": -1}, "ask_s"),
        ({"question": "Who?", "answer": "Ann", "ask_s": 1, "lasts": "no"}, "lasts"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_by_its_line(tmp_path: Path, row: object, said: str) -> None:
    file = write(tmp_path / "q.jsonl", {"question": "Who?", "answer": "Ann", "ask_s": 1}, row)
    with pytest.raises(ConfigError, match=said):
        load_questions(file)


def test_a_missing_file_of_questions_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"absent\.jsonl"):
        load_questions(tmp_path / "absent.jsonl")


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
        ReplayFile(tmp_path / "x.mp4", [Question("1", "A?", "a", "", 0.0, "query")])
