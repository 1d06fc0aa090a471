"""Exit 0 means that the state is there and whole; what was watched is kept whatever ends the run.

Kills at any instant, of every form, are in `tests/state/test_faults.py`; locks between processes in
`test_lock.py`.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protokv.ingestion import IngestProgress, events
from protokv.state.commit import lock
from protokv.state.reader import load_state
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, read_to_the_end, wait_for_commit, write_video
from tests.cli.terminal import run_on_terminal

ARGUMENTS = ("--budget", "24", "--json")
EVERY_STEP = (*ARGUMENTS, "--every", "1steps")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More steps than a page has lines, so that the program waits for its reader."""
    return write_video(tmp_path_factory.mktemp("long") / "long.mp4", 40, rate=2)


def test_a_signal_to_the_group_commits_and_the_same_command_ends_in_the_bytes_of_one_run(
    embedded: Program, long: Path
) -> None:
    with embedded.start("ingest", long, *EVERY_STEP, new_session=True) as process:
        wait_for_commit(process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = read_to_the_end(process)
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert "stopping after this step" in err
    assert "is committed" in err
    assert json.loads(out.splitlines()[-1])["complete"] is False
    resumed = embedded("ingest", long, *ARGUMENTS)
    assert "continuing long.safetensors at" in resumed.err
    assert embedded("ingest", long, *ARGUMENTS, "-o", "whole.safetensors").code == 0
    assert Path("long.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()


def test_a_system_without_hang_ups_has_the_program(long: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "del signal.SIGHUP, os.killpg\n"
        "from protokv_cli.main import run\n"
        "run()"
    )
    state = tmp_path / "a.safetensors"
    command = [sys.executable, "-c", code, "ingest", str(long), *ARGUMENTS, "-o", str(state)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert state.is_file()


@pytest.mark.usefixtures("mocked")
def test_a_terminal_that_goes_away_commits_and_its_second_signal_does_not_kill(
    protokv: Program, video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[IngestProgress] = []

    def progress(**values: Any) -> IngestProgress:
        told.append(IngestProgress(**values))
        if len(told) == 5:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
        return told[-1]

    told_by = SimpleNamespace(**{**vars(events), "IngestProgress": progress})
    monkeypatch.setattr("protokv.ingestion.watching.events", told_by)
    # Hear SIGHUP, which nohup ignores for the tests themselves.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert protokv("ingest", video, *ARGUMENTS).code == ExitCode.HUNG_UP
    signal.signal(signal.SIGHUP, before)
    state = load_state("clip.safetensors")
    assert (state.complete, state.clock.steps) == (False, 5)


def test_a_reader_who_leaves_ends_the_report_and_is_no_error(
    protokv: Program, mocked: None, video: Path
) -> None:
    pipe = protokv.folder / "pipe"
    os.mkfifo(pipe)

    def read_a_line() -> None:
        with pipe.open() as out:
            out.readline()

    asking = ("query", "clip.safetensors", *["what is first ?"] * 500, "--json")
    for command in (("ingest", video, *EVERY_STEP), asking):
        reader = threading.Thread(target=read_a_line)
        reader.start()
        seen = run_on_terminal(protokv.environment, *command, stdout=pipe)
        reader.join()
        assert seen.code == ExitCode.DONE, seen.screen
        assert "Error" not in seen.screen
        # The ingest goes on, because its purpose is the state.
        assert load_state("clip.safetensors").complete


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_report_that_cannot_be_written_is_told_and_the_state_is_there(
    protokv: Program, mocked: None, video: Path
) -> None:
    seen = run_on_terminal(
        protokv.environment, "ingest", video, *ARGUMENTS, stdout=Path("/dev/full")
    )
    assert seen.code == ExitCode.FAILURE
    assert "Error: stdout cannot be written" in seen.screen
    assert load_state("clip.safetensors").complete


def test_a_second_writer_is_refused_and_readers_have_the_last_commit(
    protokv: Program, mocked: None, video: Path
) -> None:
    assert protokv("ingest", video, *ARGUMENTS).code == 0
    with lock("clip.safetensors"):
        for more in ((), ("--force",), ("--append", "-o", "clip.safetensors")):
            assert protokv("ingest", video, *ARGUMENTS, *more).code == ExitCode.LOCKED
        assert protokv("query", "clip.safetensors", "what is first ?").code == 0
        assert protokv("inspect", "clip.safetensors").code == 0
        assert protokv("ingest", video, *ARGUMENTS, "-o", "other.safetensors").code == 0


def test_bad_subtitles_are_one_warning_and_a_partial_end(
    protokv: Program, mocked: None, video: Path
) -> None:
    (protokv.folder / "bad.srt").write_bytes(b"junk\0" * 99)
    result = protokv("ingest", video, *ARGUMENTS, "--subtitles", "bad.srt")
    assert (result.code, result.err.count("Warning: bad.srt: ")) == (ExitCode.PARTIAL, 1)
    assert "\nHint: mend that, or choose other words with --subtitles" in result.err
    assert result.rows()[-1]["complete"]


def test_too_little_memory_is_told_in_one_line_and_is_no_bug(
    embedded: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: tried 9 "
        "bytes"
    )
    for error in (torch, OSError(errno.ENOMEM, "Cannot allocate memory")):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise RuntimeError("a library failed") from error

        monkeypatch.setattr("protokv.state.reader.StateReader.open", fail)
        found = embedded("inspect", "a.safetensors")
        assert found.code == ExitCode.FAILURE
        error_line, hint = found.err.splitlines()
        assert error_line.startswith("Error: there is not enough memory")
        assert "bug" not in hint
