"""One writer at a time; a lock that ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protokv.errors import StateError, StateLocked
from protokv.storage.lock import Lock

HOLD = """
import sys
from protokv.storage.lock import Lock
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


def test_the_second_process_is_refused_until_the_first_has_ended(tmp_path):
    path = tmp_path / "a.safetensors"
    with holder(path) as process:
        with pytest.raises(StateLocked) as caught, Lock(path):
            pass
        assert f"{path} is being written by another writer" in caught.value.message
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
        with pytest.raises(StateLocked), Lock(path):
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


def test_a_lock_file_that_its_owner_removes_at_the_last_moment_locks_nothing(tmp_path, monkeypatch):
    """The owner unlinks between our opening and our locking: what we locked is no longer the file."""
    path, real, calls = tmp_path / "a", fcntl.flock, []

    def flock(number: int, how: int) -> None:
        calls.append(number)
        if len(calls) == 1:
            (tmp_path / ".a.lock").unlink()
        real(number, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StateLocked), Lock(path):
        pass
    with Lock(path), holder_refused(path):
        pass
    assert names(tmp_path) == []


@contextmanager
def holder_refused(path: Path) -> Iterator[None]:
    result = subprocess.run(
        [sys.executable, "-c", HOLD, str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert "StateLocked" in result.stderr
    yield


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_to_hold_none(number, tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with Lock(tmp_path / "a") as lock:
        assert not lock.held
    assert names(tmp_path) == []


def test_a_folder_that_is_not_there_is_one_error(tmp_path):
    with pytest.raises(StateError, match=r"cannot write the state .*no/a"), Lock(tmp_path / "no" / "a"):
        pass


@pytest.mark.parametrize("what", ["link", "link to nothing", "folder"])
def test_a_lock_file_that_cannot_be_ours_is_refused_and_nothing_is_made_through_it(what, tmp_path):
    mine, lock = tmp_path / "mine.txt", tmp_path / ".a.lock"
    mine.write_text("mine")
    match what:
        case "link":
            lock.symlink_to(mine)
        case "link to nothing":
            lock.symlink_to(tmp_path / "new")
        case _:
            lock.mkdir()
    with (
        pytest.raises(StateError, match=r"cannot write the state .*a: \.a\.lock beside it is no lock file"),
        Lock(tmp_path / "a"),
    ):
        pass
    assert mine.read_text() == "mine"
    assert names(tmp_path) == [".a.lock", "mine.txt"]


def test_nothing_is_written_to_a_file_that_has_the_name_of_the_lock(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (tmp_path / ".a.lock").hardlink_to(mine)
    with Lock(tmp_path / "a") as lock:
        assert lock.held
    assert mine.read_text() == "mine"


def test_a_forked_child_that_leaves_the_block_takes_nothing_from_its_parent(tmp_path):
    path = tmp_path / "a"
    code = HOLD.replace(
        'print("held"', 'import os\n    child = os.fork() or sys.exit()\n    os.wait()\n    print("held"'
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert names(tmp_path) == [".a.lock"]
        with pytest.raises(StateLocked), Lock(path):
            pass
        process.stdin.close()


def test_the_lock_needs_no_torch():
    code = "import sys, protokv.storage.lock; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
