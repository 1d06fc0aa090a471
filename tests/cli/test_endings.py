"""Exit 0 means that the state is there and whole, and what was watched is kept whatever else goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protokv import storage
from protokv.ingestion import NEVER, Progress
from protokv_cli.exits import Exit
from protokv_cli.signals import stopping
from tests.cli.conftest import Program, write_video
from tests.warmed import WarmedProgram

ARGUMENTS = ("--budget", "24", "--json")


def test_a_reader_who_leaves_ends_the_report_and_not_the_ingest(
    protokv: Program, start: Callable[..., WarmedProgram], tmp_path: Path
) -> None:
    video = write_video(tmp_path / "long.mp4", 40, rate=2)
    with start("ingest", video, *ARGUMENTS, "--every", "1steps") as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=120)
    assert process.returncode == Exit.DONE, err
    assert "Error" not in err
    state = storage.load_state(protokv.folder / "long.safetensors")
    assert (state.complete, state.clock.steps) == (True, 40)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_report_that_cannot_be_written_is_told_and_the_state_is_there(protokv: Program, video: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "protokv", "ingest", str(video), *ARGUMENTS, "--model", "protokv/mini"]
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=protokv.environment, timeout=120, check=False
        )
    assert result.returncode == Exit.FAILURE
    assert "Error: stdout cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert storage.load_state(protokv.folder / "clip.safetensors").complete


def test_a_terminal_that_goes_away_commits_and_its_second_signal_does_not_kill(
    protokv: Program, start: Callable[..., WarmedProgram], tmp_path: Path
) -> None:
    video = write_video(tmp_path / "long.mp4", 120, rate=2)
    with start("ingest", video, *ARGUMENTS, "--every", "1steps") as process:
        process.stdout.readline()
        process.stdout.readline()
        process.stderr.close()
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        process.stdout.read()
        process.wait(timeout=120)
    assert process.returncode == Exit.HUNG_UP
    state = storage.load_state(protokv.folder / "long.safetensors")
    assert not state.complete
    assert state.clock.steps >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_is_a_stop_and_no_damage(
    start: Callable[..., WarmedProgram], tmp_path: Path, number: signal.Signals
) -> None:
    video = write_video(tmp_path / "long.mp4", 120, rate=2)
    with start("ingest", video, *ARGUMENTS, "--every", "1steps", new_session=True) as process:
        process.stdout.readline()
        process.stdout.readline()
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["complete"], summary["damaged"]) == (False, False)


def test_who_ignores_the_hang_up_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping(lambda _: None) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_keeps_what_was_watched_and_says_so(
    protokv: Program, mocked: None, video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Progress] = []

    def progress(**values: object) -> Progress:
        told.append(Progress(**values))  # type: ignore[arg-type]
        if len(told) == 5:
            raise RuntimeError("the projector is on fire")
        return told[-1]

    monkeypatch.setattr("protokv.ingestion.watching.Progress", progress)
    result = protokv("ingest", video, *ARGUMENTS)
    assert result.code == Exit.FAILURE
    assert "Error: RuntimeError: the projector is on fire" in result.err
    assert "Note: clip.safetensors holds what was watched until 5 s" in result.err
    assert storage.load_state("clip.safetensors").clock.steps == 5


def test_an_error_in_the_report_keeps_what_was_watched(
    protokv: Program, mocked: None, video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(event: object) -> dict[str, object]:
        if isinstance(event, Progress):
            raise ZeroDivisionError
        return {}

    monkeypatch.setattr("protokv_cli.progress.asdict", broken)
    assert protokv("ingest", video, *ARGUMENTS).code == Exit.FAILURE
    assert storage.load_state("clip.safetensors").clock.steps == 1


def test_damage_is_shown_and_the_same_command_keeps_its_exit_code(
    protokv: Program, mocked: None, tmp_path: Path
) -> None:
    path = write_video(tmp_path / "cut.mkv", 12)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    runs = [protokv("ingest", path, *ARGUMENTS) for _ in range(3)]
    assert [run.code for run in runs] == [Exit.PARTIAL] * 3
    assert len({run.rows()[-1]["damage"] for run in runs}) == 1
    (document,) = protokv("inspect", "cut.safetensors", "--json").rows()
    assert document["stream"]["damage"] == runs[0].rows()[-1]["damage"]
    assert "damaged" in protokv("inspect", "cut.safetensors", "--format", "table").out


def test_how_often_to_commit_is_left_to_the_kind_of_source_unless_it_is_said(
    protokv: Program, mocked: None, video: Path
) -> None:
    wanted: list[object] = []

    def spy(*_: object, every: object, **__: object) -> None:
        wanted.append(every)
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protokv_cli.ingest_one.ingest", spy)
        protokv("ingest", video)
        protokv("ingest", video, "--every", "never")
    assert wanted == [None, NEVER]
