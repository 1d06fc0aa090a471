"""A commit replaces one file, and nothing else of its folder."""

from __future__ import annotations

import os
import stat

import pytest

from protokv.errors import StateError, StateNotFound
from protokv.state import commit
from protokv.state.reader import load_state
from protokv.state.writer import save_state
from tests.state.conftest import same


def test_the_mode_follows_the_umask(make_state, tmp_path):
    before = os.umask(0o027)
    try:
        save_state(make_state(), tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o640


def test_a_missing_or_read_only_folder_is_one_error(make_state, tmp_path, monkeypatch):
    with pytest.raises(StateError, match=r"no/a\.safetensors: there is no folder .*no$") as caught:
        save_state(make_state(), tmp_path / "no" / "a.safetensors")
    assert caught.value.hint == "create the folder first"
    # The user may be root, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StateError, match="is read-only"):
        save_state(make_state(), tmp_path / "a.safetensors")


@pytest.mark.parametrize("exchanges", [True, False])
def test_other_files_of_the_folder_are_left_alone(exchanges, make_state, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(commit, "exchange", lambda *_: False)
    kept = [".a.safetensors.note", "b.safetensors.x.partial", ".b.safetensors.1-2.partial", "a.safetensors.bak"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    for suffix in (".safetensors", ".zarr"):
        (tmp_path / f".a{suffix}.partial").write_text("left by a killed commit")
        for _ in range(2):
            save_state(make_state(), tmp_path / f"a{suffix}")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "a.safetensors", "a.zarr"])
    assert all((tmp_path / name).read_text() == "mine" for name in kept)


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_empty_folder_is_no_state_yet_and_becomes_one(exchanges, make_state, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(commit, "exchange", lambda *_: False)
    path = tmp_path / "e.zarr"
    path.mkdir()
    with pytest.raises(StateNotFound):
        load_state(path)
    save_state(make_state(), path)
    assert same(load_state(path), make_state())
