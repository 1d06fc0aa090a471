"""Files of questions: what a row needs, and how a wrong one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protokv.errors import ConfigError, SourceNotFound
from protokv.replay.questions import load_questions


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_evidence_comes_before_the_query_time_as_reference(tmp_path: Path) -> None:
    file = write(
        tmp_path / "q.jsonl",
        {"question": "Who?", "answer": "Ann", "type": "EPM", "evidence_s": 4, "ask_s": 60, "video": "a.mp4"},
        "",
        {"question": "What?", "answer": "tea", "task": "ASI", "realtime": 33.5, "id": 7},
    )
    (video, first), (none, second) = load_questions(file)
    assert (video, first.reference, first.reference_s, first.type) == ("a.mp4", "evidence", 4.0, "EPM")
    assert (none, second.reference, second.reference_s, second.id) == (None, "query", 33.5, "7")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ({"question": "Who?", "evidence_s": 1}, "line 2: answer must be text"),
        ({"question": "Who?", "answer": "Ann"}, "line 2: expected evidence_s"),
        ({"question": "Who?", "answer": "Ann", "ask_s": "soon"}, "got 'soon'"),
        ({"question": "Who?", "answer": "Ann", "ask_s": -1}, "got -1"),
        ({"question": "Who?", "answer": "Ann", "ask_s": True}, "got True"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_by_its_line(tmp_path: Path, row: object, said: str) -> None:
    file = write(tmp_path / "q.jsonl", {"question": "Who?", "answer": "Ann", "ask_s": 1}, row)
    with pytest.raises(ConfigError, match=said):
        load_questions(file)


def test_a_missing_file_of_questions_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"absent\.jsonl"):
        load_questions(tmp_path / "absent.jsonl")
