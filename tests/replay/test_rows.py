"""Rows survive, and a file holds one study."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import ConfigError, SourceNotFound
from protokv.replay.rows import RowFile, read_rows
from tests.replay.rows import ROW, example_rows


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "r.jsonl")
    for row in example_rows():
        file.append(row)
    assert read_rows([tmp_path / "r.jsonl"]) == example_rows()
    assert RowFile(tmp_path / "r.jsonl").rows.keys() == {row.key for row in example_rows()}


@pytest.mark.parametrize("cut", [2, 20, 200])
def test_a_torn_last_line_is_dropped_and_the_file_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r.jsonl"
    file = RowFile(path)
    for row in example_rows():
        file.append(row)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_rows([path]) == example_rows()[:-1]
    again = RowFile(path)
    again.append(example_rows()[-1])
    assert read_rows([path]) == example_rows()


def test_a_line_in_the_middle_that_is_no_row_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(asdict(ROW)) + '\n{"video": "a"}\n' + json.dumps(asdict(ROW)) + "\n")
    with pytest.raises(ConfigError, match=r"line 2 .*question_id"):
        read_rows([path])
    with pytest.raises(SourceNotFound, match="absent"):
        read_rows([tmp_path / "absent"])


def test_packed_rows_are_read_and_damaged_ones_refused(tmp_path: Path) -> None:
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in example_rows())
    packed = tmp_path / "r.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.encode()))
    assert read_rows([packed]) == example_rows()
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"r\.jsonl\.gz cannot be read"):
        read_rows([packed])


def test_the_same_row_of_a_later_file_replaces_the_earlier(tmp_path: Path) -> None:
    for name, answer in (("a", "red"), ("b", "blue")):
        RowFile(tmp_path / name).append(replace(ROW, prediction=answer))
    (row,) = read_rows([tmp_path / "a", tmp_path / "b"])
    assert row.prediction == "blue"


CHANGES: dict[str, dict[str, Any]] = {
    "the protocol": {"protocol": 99},
    "the model": {"model": {**ROW.model, "weights_digest": "other"}},
    "the decoding": {"decoding": {"max_new_tokens": 3}},
    "the stream a": {"stream": {"fps": 1.0, "fingerprint": "f"}},
    "question 1 about a": {"expected": "blue"},
    "question 1 about a ": {"question": "Which?"},
    "the memory full at 64 tokens": {"config": {"kind": "full", "seed": 1}},
}


@pytest.mark.parametrize(("fact", "change"), CHANGES.items(), ids=CHANGES.keys())
def test_a_row_of_another_study_is_another_row_and_is_refused(
    tmp_path: Path, fact: str, change: dict[str, Any]
) -> None:
    other = replace(ROW, **change)
    assert other.key != ROW.key
    file = RowFile(tmp_path / "r.jsonl")
    file.append(ROW)
    file.check([ROW])
    with pytest.raises(ConfigError, match=rf"r\.jsonl holds results of another study: {fact.strip()} had .* now has"):
        file.check([other])
    file.append(other)
    with pytest.raises(ConfigError, match=r"line 2 is of another study"):
        read_rows([tmp_path / "r.jsonl"])


def test_other_videos_questions_memories_budgets_and_delays_belong_to_one_study(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "r.jsonl")
    file.append(ROW)
    changes: list[dict[str, Any]] = [
        {"video": "b", "stream": {"fingerprint": "g"}}, {"question_id": "2", "question": "Who?"},
        {"memory": "window", "config": {}}, {"budget": 32, "config": {"budget": 32}}, {"delay_s": 5.0},
    ]  # fmt: skip
    others = [replace(ROW, **change) for change in changes]
    file.check(others)
    assert len({row.key for row in [ROW, *others]}) == 6


def test_a_model_is_known_by_its_weights_whatever_it_is_called() -> None:
    assert replace(ROW, model={**ROW.model, "name": "elsewhere"}).key == ROW.key
    nameless = replace(ROW, model={**ROW.model, "weights_digest": ""})
    assert replace(nameless, model={**nameless.model, "name": "elsewhere"}).key != nameless.key
