"""One writer at a time; a lock that ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protokv.errors import StateError, StateLocked
from protokv.snapshot.lock import Lock

HOLD = """
import sys
from protokv.snapshot.lock import Lock
with Lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
print("released", flush=True)
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its stdin is closed."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_second_process_is_told_who_writes_and_since_when(tmp_path):
    path = tmp_path / "a.safetensors"
    with holder(path) as process:
        with pytest.raises(StateLocked) as caught, Lock(path):
            pass
        assert f"process {process.pid} on {socket.gethostname()} since 20" in caught.value.message
        assert str(path) in caught.value.message
        assert "query" in caught.value.hint
        with pytest.raises(StateLocked), Lock(path):
            pass
        process.stdin.close()
        assert process.stdout.readline() == "released\n"
    with Lock(path) as lock:
        assert lock.held


def test_the_lock_of_a_killed_process_is_free_at_once_although_its_file_is_left(tmp_path):
    path = tmp_path / "a.safetensors"
    with holder(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert names(tmp_path) == [".a.safetensors.lock"]
    with Lock(path) as lock:
        assert lock.held
        assert json.loads((tmp_path / ".a.safetensors.lock").read_text())["pid"] == os.getpid()
    assert names(tmp_path) == []


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path):
    path = tmp_path / "a"
    code = HOLD.replace(
        "sys.stdin.read()", "import os\n    os.fork() or (os.close(1), sys.stdin.read())\n    os.abort()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"held\n"
        assert process.stdout.read() == b""
        process.wait(timeout=60)
        # The child lives until its stdin ends, and holds every descriptor that its parent had.
        with Lock(path) as lock:
            assert lock.held


def test_a_second_writer_in_the_same_process_is_refused_and_does_not_drop_the_lock(tmp_path):
    path = tmp_path / "a.safetensors"
    code = HOLD.replace('print("held"', 'print("got"')
    with Lock(path):
        with pytest.raises(StateLocked, match="this process"), Lock(path):
            pass
        result = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        assert "StateLocked" in result.stderr
    with Lock(path):
        pass


def test_a_link_and_its_target_have_one_lock_and_other_states_another(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/real")
    real, other, link = tmp_path / "there" / "real", tmp_path / "there" / "other", tmp_path / "link"
    with Lock(real), Lock(other), pytest.raises(StateLocked), Lock(link):
        pass
    assert names(tmp_path / "there") == []


def test_a_lock_file_that_its_owner_removes_at_the_last_moment_is_made_anew(tmp_path, monkeypatch):
    """The owner unlinks between our opening and our locking: what we locked is no longer the file."""
    path, real, calls = tmp_path / "a", fcntl.lockf, []

    def lockf(number: int, how: int) -> None:
        calls.append(number)
        if len(calls) == 1:
            (tmp_path / ".a.lock").unlink()
        real(number, how)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with Lock(path), holder_refused(path):
        pass
    assert len(calls) == 2


@contextmanager
def holder_refused(path: Path) -> Iterator[None]:
    result = subprocess.run(
        [sys.executable, "-c", HOLD, str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert "StateLocked" in result.stderr
    yield


def test_a_file_that_says_nonsense_does_not_matter(tmp_path):
    (tmp_path / ".a.lock").write_bytes(b'{"pid": \xff')
    with Lock(tmp_path / "a") as lock:
        assert lock.held


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_to_hold_none(number, tmp_path, monkeypatch):
    def lockf(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with Lock(tmp_path / "a") as lock:
        assert not lock.held
    assert names(tmp_path) == []


def test_a_folder_that_is_not_there_is_one_error(tmp_path):
    with pytest.raises(StateError, match=r"cannot lock the state .*no/a"), Lock(tmp_path / "no" / "a"):
        pass


@pytest.mark.parametrize("what", ["link", "link to nothing", "second name", "folder", "pipe"])
def test_a_lock_file_that_is_not_ours_is_refused_and_nothing_of_the_users_is_written(what, tmp_path):
    mine, lock = tmp_path / "mine.txt", tmp_path / ".a.lock"
    mine.write_text("mine")
    match what:
        case "link":
            lock.symlink_to(mine)
        case "link to nothing":
            lock.symlink_to(tmp_path / "new")
        case "second name":
            lock.hardlink_to(mine)
        case "folder":
            lock.mkdir()
        case _:
            os.mkfifo(lock)
    with (
        pytest.raises(StateError, match=r"cannot lock the state .*a: \.a\.lock beside it is no lock file"),
        Lock(tmp_path / "a"),
    ):
        pass
    assert mine.read_text() == "mine"
    assert names(tmp_path) == [".a.lock", "mine.txt"]


def test_on_a_full_disk_the_lock_holds_without_a_name(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with Lock(tmp_path / "a") as lock:
        assert lock.held


def test_the_lock_needs_no_torch():
    code = "import sys, protokv.snapshot.lock; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
