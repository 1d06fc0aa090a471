"""Whatever the system refuses a command, it says one line, and never that a whole state is damaged or missing."""

from __future__ import annotations

import errno
import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from protokv.state.api import load_state
from protokv_cli.exits import Exit
from tests import faults
from tests.cli.conftest import Program, Result
from tests.faults import Fault
from tests.fleet.conftest import InlinePool
from tests.fleet.recipes import MockRecipe
from tests.state.test_faults import contents

pytestmark = [faults.needs_linux, pytest.mark.usefixtures("mocked")]

EVERY_STEP = ("--budget", "24", "--every", "1steps", "--keep", "2", "--thumbnails", "0", "--json")
COMMANDS = {
    "start": ("ingest", "{video}", *EVERY_STEP, "-o", "work/new.safetensors"),
    "resume": ("ingest", "{video}", *EVERY_STEP, "-o", "work/a.safetensors"),
    "query": ("query", "work/a.safetensors", "what is first ?"),
    "verify": ("inspect", "work/a.safetensors", "--verify"),
    "convert": ("inspect", "work/a.safetensors", "-o", "work/a.zarr"),
    "fleet": ("ingest", "{video}", "{second}", *EVERY_STEP, "-o", "work"),
}
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
# 0: the first call at each place of the program.
EVERYTHING = [
    *itertools.product(COMMANDS, (errno.EIO, errno.ENOSPC, errno.EACCES), (0,)),
    # The others handle signals, which only the first thread may, and memory is counted in another.
    *itertools.product(("query", "verify", "convert"), (errno.ENOMEM,), (1,)),
]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers of a fleet be in the process whose calls fail."""

    class Pool(InlinePool):
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def open_pool(fleet: object, recipe: MockRecipe) -> Pool:
        return Pool(MockRecipe(place=recipe.place, options=recipe.options))

    monkeypatch.setattr("protokv_cli.ingest_fleet._open_pool", open_pool)


def check(result: Result, error: int) -> None:
    lines = result.err.splitlines()
    assert not any(line.startswith("Traceback") for line in lines), result.err
    errors = [line for line in lines if line.startswith("Error: ")]
    assert len(errors) == (result.code not in (Exit.DONE, Exit.PARTIAL)), result.err
    assert "looks like a bug" not in result.err, result.err
    assert result.code in (Exit.DONE, Exit.FAILURE, Exit.PARTIAL), result.err


@pytest.mark.parametrize(
    ("name", "error", "every"),
    [
        ("query", errno.EIO, 13),
        ("query", errno.ENOMEM, 21),
        *(pytest.param(*one, marks=SLOW) for one in EVERYTHING),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_a_refused_call_is_one_line_and_no_damage(
    name: str, error: int, every: int, protokv: Program, video: Path, tmp_path: Path
) -> None:
    base, work = tmp_path / "base", tmp_path / "work"
    base.mkdir()
    second = shutil.copy(video, tmp_path / "second.mp4")
    made = protokv("ingest", video, *EVERY_STEP, "-o", base / "a.safetensors")
    assert made.code == 0, made.err
    command = [part.format(video=video, second=second) for part in COMMANDS[name]]
    kind = "memory" if error == errno.ENOMEM else "files"
    names = {errno.ENOSPC: frozenset(faults.TAKES_SPACE), errno.EACCES: frozenset(faults.ASKS)}.get(error)
    fault, numbers = Fault(0, error, kind, lasting=error == errno.ENOSPC, names=names), itertools.count(every, every)
    if not every:
        shutil.copytree(base, work)
        numbers = iter([*faults.run(lambda: protokv(*command), work, fault, places=True).first, 1 << 20])
        shutil.rmtree(work)
    failed, ends, seen = 0, set(), set()
    for n in numbers:
        shutil.copytree(base, work)
        fault = replace(fault, at=n)
        ended = faults.run(lambda: protokv(*command), work, fault)
        assert (ended.status, ended.error) == (0, None)
        try:
            check(ended.value, error)
        except AssertionError as wrong:
            wrong.add_note(f"{fault}: {ended.failed_call}")
            raise
        # What follows depends on the folder alone.
        if (left := hash((*contents(work),))) not in seen:
            seen.add(left)
            load_state(work / "a.safetensors")
            again = protokv(*command)
            assert again.code == 0, again.err
            # The last one has met no fault.
            ends.add(tuple((one.name, one.read_bytes()) for one in sorted(work.glob("*.safetensors"))))
        shutil.rmtree(work)
        if len(ended.calls) < n:
            break
        failed += 1
    assert len(ends) == 1
    print(f"{name} {errno.errorcode[error]}: {failed} of {len(ended.calls)} calls")
