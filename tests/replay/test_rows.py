"""Rows survive, and a file holds one study."""

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from protokv.errors import ConfigError, SourceNotFound
from protokv.replay.rows import AnswerRowFile, read_answer_rows
from protokv.texts import JsonObject, Keywords
from tests.replay.rows import ROW, example_rows


def write(path: Path) -> Path:
    file = AnswerRowFile(path)
    for row in example_rows():
        file.append(row)
    return path


@pytest.mark.parametrize("cut", [0, 2, 20, 200])
def test_rows_are_read_back_and_a_torn_last_line_is_dropped_and_the_file_goes_on(
    tmp_path: Path, cut: int
) -> None:
    path = write(tmp_path / "r.jsonl")
    whole = example_rows()
    path.write_bytes(path.read_bytes()[: -cut or None])
    assert read_answer_rows([path]) == whole[: -1 if cut else None]
    again = AnswerRowFile(path)
    again.append(whole[-1])
    assert read_answer_rows([path]) == whole
    assert again.rows.keys() == {row.key for row in whole}
    # Of equal rows the last one counts.
    again.append(replace(whole[-1], prediction="other"))
    assert read_answer_rows([path])[-1].prediction == "other"


def test_what_is_no_file_of_rows_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(asdict(ROW)) + '\n{"video": "a"}\n' + json.dumps(asdict(ROW)) + "\n")
    with pytest.raises(ConfigError, match=r"line 2 .*question_id"):
        read_answer_rows([path])
    with pytest.raises(SourceNotFound, match="absent"):
        read_answer_rows([tmp_path / "absent"])
    packed = tmp_path / "r.jsonl.gz"
    packed.write_bytes(gzip.compress(write(path.with_name("whole")).read_bytes()))
    assert read_answer_rows([packed]) == example_rows()
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"r\.jsonl\.gz cannot be read"):
        read_answer_rows([packed])


CHANGES: dict[str, JsonObject] = {
    "the protocol": {"protocol": 99},
    "the model": {"model": {**ROW.model, "weights_digest": "other"}},
    "the decoding": {"decoding": {"max_new_tokens": 3}},
    "the stream a": {"stream": {"fps": 1.0, "fingerprint": "f"}},
    "question 1 about a": {"expected": "blue", "question": "Which?"},
    "the memory full at 64 tokens": {"config": {"kind": "full", "seed": 1}},
}


@pytest.mark.parametrize(("fact", "change"), CHANGES.items(), ids=CHANGES.keys())
def test_a_row_of_another_study_is_another_and_is_refused(
    tmp_path: Path, fact: str, change: JsonObject
) -> None:
    other = replace(ROW, **change)
    assert other.key != ROW.key
    file = AnswerRowFile(tmp_path / "r.jsonl")
    file.append(ROW)
    with pytest.raises(
        ConfigError,
        match=rf"r\.jsonl holds results of another study: {fact.strip()} had .* now has",
    ):
        file.check([ROW, other])
    file.append(other)
    with pytest.raises(ConfigError, match=r"line 2 is of another study"):
        read_answer_rows([tmp_path / "r.jsonl"])


def test_other_videos_questions_memories_budgets_and_delays_belong_to_one_study(
    tmp_path: Path,
) -> None:
    changes: list[Keywords] = [
        {"video": "b", "stream": {"fingerprint": "g"}},
        {"question_id": "2", "question": "Who?"},
        {"memory": "window", "config": {}},
        {"budget": 32, "config": {"budget": 32}},
        {"delay_s": 5.0},
    ]
    rows = [ROW, *(replace(ROW, **change) for change in changes)]
    AnswerRowFile(tmp_path / "r.jsonl").check(rows)
    assert len({row.key for row in rows}) == 6
    # A model is known by its weights, whatever it is called.
    for digest, same in (("w", True), ("", False)):
        one, other = (
            replace(ROW, model={"name": name, "weights_digest": digest})
            for name in ("here", "elsewhere")
        )
        assert (one.key == other.key) == same
