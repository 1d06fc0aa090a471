"""One writer at a time; the lock ends with its process, however the process ends."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protokv.errors import StateLocked
from protokv.state.commit import lock
from protokv.state.store import find_store
from tests.state.conftest import names

HOLD = """
import sys
from protokv.state.commit import lock
with lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_another_process_is_refused_until_the_first_has_ended(killed: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    command = [sys.executable, "-c", HOLD, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == "held\n"
        assert names(tmp_path) == [".a.safetensors.lock"]
        for take in (lock, find_store):
            with (
                pytest.raises(StateLocked, match=f"{path} is being written by another writer"),
                take(path),
            ):
                pass
        process.kill() if killed else process.stdin.close()
        process.wait(timeout=60)
    # A file that a killed process leaves locks nothing.
    assert names(tmp_path) == ([".a.safetensors.lock"] if killed else [])
    with lock(path) as held:
        assert held
    assert names(tmp_path) == []


def test_a_link_and_its_target_have_one_lock_and_other_states_another(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/real")
    there = tmp_path / "there"
    with (
        lock(there / "real"),
        lock(there / "other"),
        pytest.raises(StateLocked),
        lock(tmp_path / "link"),
    ):
        pass
    assert names(tmp_path / "there") == []


def test_a_file_system_without_locks_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(tmp_path / "a") as held:
        assert not held
    assert names(tmp_path) == []
