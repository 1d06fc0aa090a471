"""One writer at a time; the lock ends with its process, however the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protokv.errors import StateLocked
from protokv.state.commit import lock

HOLD = """
import sys
from protokv.state.commit import lock
with lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds the lock until its stdin is closed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], **pipes, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def check_locked(path: Path) -> None:
    with pytest.raises(StateLocked) as caught, lock(path):
        pass
    assert f"{path} is being written by another writer" in caught.value.message
    assert "query" in caught.value.hint


def check_free(path: Path) -> None:
    with lock(path) as held:
        assert held


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_another_process_is_refused_until_the_first_has_ended(tmp_path):
    path = tmp_path / "a.safetensors"
    with holder(path) as process:
        assert names(tmp_path) == [".a.safetensors.lock"]
        check_locked(path)
        check_locked(path)
        process.stdin.close()
        process.wait(timeout=60)
        assert names(tmp_path) == []
    check_free(path)


def test_the_lock_of_a_killed_process_is_free_at_once_although_its_file_stays(tmp_path):
    with holder(tmp_path / "a") as process:
        process.kill()
        process.wait(timeout=60)
    assert names(tmp_path) == [".a.lock"]
    check_free(tmp_path / "a")
    assert names(tmp_path) == []


def test_a_link_and_its_target_have_one_lock_and_other_states_another(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/real")
    with lock(tmp_path / "there" / "real"), lock(tmp_path / "there" / "other"):
        check_locked(tmp_path / "link")
    assert names(tmp_path / "there") == []


def test_a_file_system_without_locks_holds_none(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(tmp_path / "a") as held:
        assert not held
    assert names(tmp_path) == []
