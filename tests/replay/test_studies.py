"""The studies of `samples.worlds` still run, and published rows are read; its own tests stand beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protokv.replay.rows import read_rows
from samples.worlds.__main__ import main
from samples.worlds.studies import FOLDER


def test_a_study_runs_and_its_rows_are_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = str(tmp_path / "rows.jsonl")
    small = ("--worlds", "5002000:1", "--memory", "durable", "--budget", "43", "--delays", "0", "--types", "colour")
    assert main(["harder", *small, "-o", rows]) == 0
    assert "all" in capsys.readouterr().out
    assert main(["--report", rows, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert {(point["part"], point["name"]) for point in points} == {("all", "all"), ("type", "colour")}
    found = {(row.video, row.question_id): row.prediction for row in read_rows([rows])}
    published = {
        (row.video, row.question_id): row.prediction
        for row in read_rows([FOLDER / "harder" / "harder.jsonl.gz"])
        if (row.memory, row.budget, row.delay_s) == ("durable", 43, 0.0)
    }
    assert found
    assert found.items() <= published.items()
