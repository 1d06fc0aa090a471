"""SIGKILL in the middle of an ingest: the last commit answers, and the same command ends in the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protokv_cli.exits import Exit
from protokv_cli.tables import time_text
from tests.cli.conftest import Program, wait_for_commits, write_video
from tests.warmed import WarmedProgram

ARGUMENTS = ("--budget", "24", "--json")


@pytest.mark.parametrize(("suffix", "keep"), [(".safetensors", 3), (".zarr", 2)])
def test_a_killed_ingest_answers_and_continues_with_the_same_command(
    suffix: str, keep: int, protokv: Program, start: Callable[..., WarmedProgram], tmp_path: Path
) -> None:
    video = write_video(tmp_path / "long.mp4", 24, rate=2)
    state, whole = f"a{suffix}", f"whole{suffix}"
    command = ("ingest", video, *ARGUMENTS, "--every", "1steps", "--keep", keep, "-o", state)
    with start(*command) as process:
        wait_for_commits(process, 3)
        process.kill()
        process.communicate(timeout=60)
    answer = protokv("query", state, "what is first ?", "--json")
    assert answer.code == 0, answer.err
    reached = answer.rows()[0]["stream_time_s"]
    assert reached >= 3.0
    resumed = protokv(*command)
    assert resumed.code == 0, resumed.err
    assert f"continuing {state} at {time_text(reached)}" in resumed.err
    assert protokv("ingest", video, *ARGUMENTS, "-o", whole).code == 0
    assert protokv("inspect", state, whole, "--json").code == Exit.DONE
    if suffix == ".safetensors":
        assert (protokv.folder / state).read_bytes() == (protokv.folder / whole).read_bytes()
    past = [f"a{suffix}@{time:010.3f}s" for time in range(24 - keep + 1, 24)]
    assert sorted(path.name for path in protokv.folder.iterdir() if path.name.startswith(("a", "."))) == [
        state,
        *past,
    ]
