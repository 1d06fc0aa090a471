"""The benchmarks at tiny sizes: they run, and what has to stay the same stays the same."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protokv.device import runs
from tests.benchmarks import gpu


def test_a_visit_measures_steps_and_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without captures, which the program sets for its process.
    monkeypatch.setattr(runs, "_can_capture", lambda device: False)
    for name in ("prepare", "steps", "kernels"):
        part, _ = gpu.PARTS[name]
        part(gpu.Visit(name, tmp_path / "rows", tmp_path, tiny=True))
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {row["part"] for row in rows} == {"prepare", "steps", "kernels"}
    (measured,) = (row for row in rows if "memory" in row)
    assert measured["same_logits"]
    parts = ("watch", "take", "vision tower", "forward", "memory", "ttft", "token")
    assert {f"{part}_ms" for part in parts} <= measured.keys()
    assert not any("error" in row for row in rows)


@pytest.mark.slow
def test_a_visit_runs_every_part_and_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--tiny", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=gpu.ROOT, capture_output=True)
    (file,) = tmp_path.glob("gpu-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["part"] for row in rows if row.get("done") == 0} == set(gpu.PARTS)
    assert [row["same_bytes"] for row in rows if "same_bytes" in row] == [True]
    assert [row["other_answers"] for row in rows if "compared" in row] == [0] * 4
    assert not any("error" in row for row in rows)


def test_a_part_that_hangs_is_ended_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.PARTS, "kernels", (gpu.measure_kernels, 0))
    visit = gpu.Visit("kernels", tmp_path / "rows", tmp_path, tiny=True)
    gpu.run_part(visit, time.monotonic() + 60)
    assert json.loads((tmp_path / "rows").read_text())["done"] == "ended after 0 s"
