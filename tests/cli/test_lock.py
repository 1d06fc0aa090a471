"""One process writes a state, others read its last commit: seen from a process that is stopped in the middle."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from protokv_cli.exits import Exit
from tests.cli.conftest import Program, wait_for_commits, write_video
from tests.warmed import WarmedProgram

ARGUMENTS = ("--budget", "24", "--json", "--every", "1steps", "--keep", "3")


@contextmanager
def stopped(start: Callable[..., WarmedProgram], video: Path, n_commits: int) -> Iterator[WarmedProgram]:
    """An ingest that is stopped after some commits, wherever it is then."""
    with start("ingest", video, *ARGUMENTS) as process:
        try:
            wait_for_commits(process, n_commits)
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def test_a_second_writer_is_refused_and_readers_have_the_last_commit(
    protokv: Program, start: Callable[..., WarmedProgram], tmp_path: Path
) -> None:
    video = write_video(tmp_path / "long.mp4", 60, rate=2)
    with stopped(start, video, 4) as process:
        refused = protokv("ingest", video, *ARGUMENTS)
        assert refused.code == Exit.LOCKED
        assert refused.err.splitlines()[0] == "Error: the state long.safetensors is being written by another writer"
        assert refused.err.splitlines()[1].startswith("Hint: wait for it or write elsewhere")
        # Neither does the one who wants to begin anew, or to append.
        assert protokv("ingest", video, *ARGUMENTS, "--force").code == Exit.LOCKED
        assert protokv("ingest", video, *ARGUMENTS, "--append", "-o", "long.safetensors").code == Exit.LOCKED
        asked = protokv("query", "long.safetensors", "what is first ?", "--json")
        assert asked.code == 0, asked.err
        assert asked.rows()[0]["stream_time_s"] >= 4.0
        seen = protokv("inspect", "long.safetensors", "--json")
        assert seen.code == 0, seen.err
        assert seen.rows()[0]["stream"]["steps"] >= 4
        assert not seen.rows()[0]["complete"]
        at = protokv("query", "long.safetensors", "what is first ?", "--at", "3s", "--json")
        assert at.code in (0, Exit.NOT_FOUND)
        # A state of another name is free.
        short = write_video(tmp_path / "short.mp4", 2)
        assert protokv("ingest", short, "--budget", "24", "--json").code == 0
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=120)[1].endswith('\nask it: protokv query long.safetensors "..."\n')
        assert process.returncode == 0
    again = protokv("ingest", video, *ARGUMENTS)
    assert again.code == 0
    assert "nothing to do" in again.err
    assert not [path for path in protokv.folder.iterdir() if path.name.startswith(".")]


def test_the_lock_of_a_killed_process_keeps_nobody_out(
    protokv: Program, start: Callable[..., WarmedProgram], tmp_path: Path
) -> None:
    video = write_video(tmp_path / "long.mp4", 30, rate=2)
    with stopped(start, video, 1) as process:
        process.kill()
        process.wait(timeout=60)
        assert (protokv.folder / ".long.safetensors.lock").exists()
        assert protokv("ingest", video, *ARGUMENTS).code == 0
