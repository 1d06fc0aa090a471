"""A commit replaces one file, and nothing else of its folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from protokv.errors import StateError
from protokv.storage.api import load_state, save_state
from protokv.storage.commit import replace
from protokv.storage.files import SafetensorsForm
from tests.storage.disk import Failing


def test_an_error_of_the_caller_passes_through_and_leaves_nothing(tmp_path):
    def write(path: Path) -> int:
        path.write_bytes(b"x")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace(tmp_path / "a", write)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_mode_follows_the_umask(umask, make_state, tmp_path):
    before = os.umask(umask)
    try:
        save_state(make_state(), tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o666 & ~umask


def test_a_missing_folder_is_one_error_with_a_hint(make_state, tmp_path):
    with pytest.raises(StateError, match=r"no/a\.safetensors: there is no folder .*no$") as caught:
        save_state(make_state(), tmp_path / "no" / "a.safetensors")
    assert caught.value.hint == "Make it first."


def test_a_folder_in_the_place_of_the_file_is_one_error(make_state, tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(StateError, match="it is a folder"):
        save_state(make_state(), tmp_path / "a.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("error", "hint"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "may write"), (errno.EACCES, "may write"), (errno.EIO, "")],
)
def test_the_hint_fits_the_error(error, hint, make_state, tmp_path):
    with pytest.raises(StateError) as caught, Failing(3, error, once=True):
        SafetensorsForm(tmp_path / "a.safetensors").replace(make_state())
    assert hint in caught.value.hint
    assert bool(hint) == bool(caught.value.hint)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_error_with_a_hint(make_state, tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(StateError, match="ermission") as caught:
            save_state(make_state(), tmp_path / "a.safetensors")
    finally:
        tmp_path.chmod(0o755)
    assert "may write" in caught.value.hint


def test_other_files_of_the_folder_are_left_alone(make_state, tmp_path):
    kept = [".a.safetensors.note", "b.safetensors.x.partial", ".b.safetensors.1-2.partial", "a.safetensors.bak"]
    # Of states whose names begin with the whole name of this one.
    kept += [".a.safetensors.zip.77-0123abcd.partial", ".a.safetensors.2.safetensors.77-0123abcd.partial"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".a.safetensors.77-0123abcd.partial").write_text("left by a killed commit")
    save_state(make_state(), tmp_path / "a.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "a.safetensors"])


def test_a_file_system_that_cannot_sync_folders_is_accepted(make_state, tmp_path, monkeypatch):
    real = os.fsync

    def fsync(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    save_state(make_state(), tmp_path / "a.safetensors")
    load_state(tmp_path / "a.safetensors")
