"""The studies of `samples.worlds` still run, and published rows are read; its own tests stand
beside it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from protokv.replay.rows import read_answer_rows
from samples.worlds.__main__ import main
from samples.worlds.studies import FOLDER


def read(path: Path) -> set[tuple[Any, ...]]:
    return {
        (row.video, row.question_id, row.memory, row.budget, row.delay_s, row.prediction)
        for row in read_answer_rows([path])
    }


def test_a_study_runs_and_its_rows_are_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    small = (
        "--worlds",
        "5002000:1",
        "--memory",
        "durable",
        "--budget",
        "43",
        "--delays",
        "0",
        "--types",
        "colour",
    )
    assert main(["harder", *small, "-o", str(rows)]) == 0
    assert "all" in capsys.readouterr().out
    assert main(["--report", str(rows), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert {(point["part"], point["name"]) for point in points} == {
        ("all", "all"),
        ("type", "colour"),
    }
    assert set() < read(rows) <= read(FOLDER / "harder" / "harder.jsonl.gz")
