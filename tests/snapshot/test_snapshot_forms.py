"""The same state in any form and back is the same bits; a folder or store is written by what changed, in one act."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protokv.errors import StateCorrupt, StateError, StateNotFound
from protokv.snapshot import (
    FORMS,
    check_target,
    load,
    read_header,
    save,
    stored_bytes,
    torch_file,
    zarr_layout,
    zarr_store,
    zarr_zip,
)
from protokv.snapshot.atomic import FileSystem
from protokv.snapshot.places import Folder, Remote
from tests.snapshot.test_snapshot_file import DTYPES, names, tensors

zarr = pytest.importorskip("zarr")
pytest.importorskip("obstore")

PLACES = ["{}/a.safetensors", "{}/a.pt", "{}/a.zarr", "{}/a.zarr.zip", "memory://{}/a.zarr"]
_numbers = itertools.count()


@pytest.fixture
def place(tmp_path):
    """A path for a pattern of PLACES, another one every time."""
    return lambda pattern: pattern.format(f"{tmp_path}/{next(_numbers)}").replace("memory:///", "memory://")


@pytest.fixture
def at(place):
    def made(pattern: str) -> str:
        path = place(pattern)
        if "://" not in path:
            Path(path).parent.mkdir()
        return path

    return made


@pytest.mark.parametrize(("first", "second"), list(itertools.product(PLACES, PLACES)))
def test_every_form_and_back_through_every_other_is_bit_exact(first, second, at, make_state, same_state):
    state = make_state(
        tensors={str(dtype): torch.arange(24).reshape(2, 3, 4).to(dtype) for dtype in DTYPES}
        | {"none": torch.empty(3, 0, 2), "scalar": torch.tensor(7.5), "truth": torch.tensor(True)}
        | {"odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]), "void": torch.empty(0)}
    )
    one, two = at(first), at(second)
    save(state, one)
    save(load(one), two)
    save(load(two), one)
    assert same_state(load(one), state)
    assert read_header(two).to_json() == state.to_json()


@pytest.mark.parametrize("pattern", PLACES[1:])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=st.dictionaries(names, tensors(), max_size=5))
def test_any_tensors_under_any_names_come_back_bit_for_bit(pattern, made, at, make_state, same_state):
    state, path = make_state(tensors=made), at(pattern)
    save(state, path)
    assert same_state(load(path), state)
    assert same_state(load(path, verify=False), state)


@pytest.mark.parametrize("pattern", PLACES)
def test_views_and_shared_storages_come_back_as_they_look(pattern, at, make_state):
    whole, path = torch.arange(60.0).reshape(3, 4, 5), at(pattern)
    made = {"a": whole.transpose(0, 2), "b": whole[:, 1], "c": whole, "d": whole, "e": whole[:1].expand(3, 4, 5)}
    save(make_state(tensors=made), path)
    found = load(path).tensors
    assert all(found[name].equal(tensor) and found[name].is_contiguous() for name, tensor in made.items())
    found["c"].zero_()
    assert found["d"].equal(whole)


@pytest.mark.parametrize("pattern", PLACES[:4])
def test_the_same_state_gives_the_same_bytes_in_every_form(pattern, at, make_state):
    def contents(path: Path) -> dict[str, bytes]:
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        return {str(p.relative_to(path)): p.read_bytes() for p in files}

    one, two = Path(at(pattern)), Path(at(pattern))
    state = make_state()
    save(state, one)
    save(replace(state, tensors=dict(reversed(list(state.tensors.items())))), two)
    assert contents(one) == contents(two)


@pytest.mark.parametrize("pattern", PLACES)
def test_a_missing_state_is_not_found_and_a_saved_one_has_its_bytes(pattern, at, make_state):
    path = at(pattern)
    for read in (load, read_header, stored_bytes):
        with pytest.raises(StateNotFound, match="a\\."):
            read(path)
    check_target(path)
    save(make_state(), path)
    check_target(path)
    assert stored_bytes(path) > sum(t.nbytes for t in make_state().tensors.values())


@pytest.mark.parametrize("pattern", PLACES)
def test_a_state_that_could_not_be_read_again_is_not_written(pattern, at, make_state):
    path = at(pattern)
    for bad, match in [
        (make_state(memory={"rate": float("inf")}), "JSON"),
        (make_state(tensors={"z": torch.zeros(2, dtype=torch.complex64)}), "tensor z"),
        (make_state(settings={"long": "x" * (5 << 20)}), "bytes"),
    ]:
        with pytest.raises(StateError, match=match):
            save(bad, path)
        with pytest.raises(StateNotFound):
            load(path)


def test_a_store_of_files_is_an_object_store_too(make_state, same_state, tmp_path):
    path = f"file://{tmp_path}/a.zarr"
    (tmp_path / "a.zarr").mkdir()
    for seed in (1, 2):
        save(make_state(seed=seed), path)
        assert same_state(load(path), make_state(seed=seed))
        assert same_state(load(tmp_path / "a.zarr"), make_state(seed=seed))
    assert stored_bytes(path) == stored_bytes(tmp_path / "a.zarr")


def test_only_zarr_can_be_in_an_object_store(make_state):
    for suffix in set(FORMS) - {".zarr"}:
        with pytest.raises(StateError, match="cannot keep a state as"):
            save(make_state(), f"memory://x/a{suffix}")
    with pytest.raises(StateError, match="object store"):
        save(make_state(), "nowhere://x/a.zarr")


# The zarr hierarchy


def test_the_zarr_library_reads_every_piece_and_the_document_joins_them(make_state, tmp_path, monkeypatch):
    monkeypatch.setattr(zarr_layout, "PIECE_BYTES", 100)
    state = make_state()
    save(state, tmp_path / "a.zarr")
    save(state, tmp_path / "a.zarr.zip")
    for root in (tmp_path / "a.zarr", zarr.storage.ZipStore(tmp_path / "a.zarr.zip")):
        group = zarr.open_group(root, mode="r")
        document = group.attrs["protokv"]
        seen = 0
        for name, entry in document["tensors"].items():
            pieces = [group[f"pieces/{digest}"] for digest in entry["pieces"]]
            seen += len(pieces)
            tensor = state.tensors[name]
            if not pieces:
                assert not tensor.numel()
                continue
            found = pieces[0][...] if not entry["shape"] else np.concatenate([p[...] for p in pieces], entry["axis"])
            assert pieces[0].attrs["protokv"]["tensor"] == name
            if tensor.dtype == torch.bfloat16:
                assert pieces[0].attrs["protokv"]["dtype"] == "bfloat16"
                tensor = tensor.view(torch.int16).numpy().view(np.uint16)
            assert found.dtype == np.asarray(tensor).dtype
            np.testing.assert_array_equal(found, np.asarray(tensor))
        assert seen > len(state.tensors)
        listed = [digest for entry in document["tensors"].values() for digest in entry["pieces"]]
        assert sorted(group["pieces"].array_keys()) == sorted(listed)


def files_of(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_ino for p in folder.rglob("*") if p.is_file()}


def test_only_what_changed_is_written(make_state, same_state, tmp_path, monkeypatch):
    monkeypatch.setattr(zarr_layout, "PIECE_BYTES", 64)
    path, state = tmp_path / "a.zarr", make_state()
    save(state, path)
    before = files_of(path)
    keys = state.tensors["near.keys"].clone()
    keys[:, :, 2, 3] += 1
    changed = replace(state, tensors=state.tensors | {"near.keys": keys})
    save(changed, path)
    after = files_of(path)
    fresh = {name for name, inode in after.items() if before.get(name) != inode}
    # One piece, its metadata, and the document.
    assert len(fresh) == 3
    assert same_state(load(path), changed)


def test_a_growing_tensor_keeps_the_pieces_it_had(make_state, tmp_path, monkeypatch):
    monkeypatch.setattr(zarr_layout, "PIECE_BYTES", 400)
    path, whole = tmp_path / "a.zarr", torch.randn(2, 200, 5)
    save(make_state(tensors={"keys": whole[:, :90]}), path)
    before = set(files_of(path))
    save(make_state(tensors={"keys": whole}), path)
    assert len(before - set(files_of(path))) == 0
    kept = [d for d in load_document(path)["keys"]["pieces"] if f"pieces/{d}/c.0.0.0" in before]
    assert len(kept) == 9


def load_document(path: Path) -> dict:
    return zarr.open_group(path, mode="r").attrs["protokv"]["tensors"]


def test_what_the_last_commit_named_stays_one_commit_longer_and_no_more(make_state, tmp_path):
    path = tmp_path / "a.zarr"
    named = []
    for seed in range(4):
        save(make_state(seed=seed), path)
        named.append({d for e in load_document(path).values() for d in e["pieces"]})
        there = {p.name for p in (path / "pieces").iterdir() if p.is_dir()}
        assert there == named[-1] | (named[-2] if seed else set())


class Slow(Folder):
    """A folder that another writer commits to `commits` times between the reading of the document and of the pieces."""

    def __init__(self, root: Path, commit, commits: int) -> None:
        super().__init__(root)
        self.commit_now, self.left, self.reads = commit, commits, 0

    def read(self, key: str, limit: int):
        if key.startswith("pieces/"):
            while self.left:
                self.left -= 1
                self.commit_now()
        elif key == "zarr.json":
            self.reads += 1
        return super().read(key, limit)


@pytest.mark.parametrize(("commits", "reads"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_a_reader_that_is_overtaken_reads_the_newer_state(commits, reads, make_state, same_state, tmp_path):
    path, seeds = tmp_path / "a.zarr", iter(range(1, 9))
    save(make_state(seed=0), path)
    slow = Slow(path, lambda: save(make_state(seed=next(seeds)), path), commits)
    slow.readers = 1
    found = zarr_store.load(path, place=slow)
    assert slow.reads == reads
    assert same_state(found, make_state(seed=0 if commits < 2 else commits))


def test_readers_beside_a_writer_only_ever_see_whole_states(make_state, same_state, tmp_path):
    path = tmp_path / "a.zarr"
    states = [make_state(seed=seed) for seed in range(6)]
    save(states[0], path)
    wrong, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            found = load(path)
            if not any(same_state(found, state) for state in states):
                wrong.append(found)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for one in readers:
        one.start()
    for n in range(24):
        save(states[n % 6], path)
    done.set()
    for one in readers:
        one.join()
    assert not wrong


class Killed(BaseException):
    """The process is gone: nothing after this call happens."""


def failing(at: int, error: int | None) -> FileSystem:
    """A file system without syncs whose call number `at` fails: with `error`, or for ever where that is None."""
    fs = FileSystem()
    fs.calls = 0
    lock = threading.Lock()

    def wrapped(name: str):
        real = getattr(FileSystem, name)

        def call(*arguments):
            with lock:
                fs.calls += 1
                now = fs.calls
            if now == at or (error is None and at and now > at):
                if name == "write" and now == at:
                    real(fs, arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                    arguments[0].flush()
                raise Killed if error is None else OSError(error, os.strerror(error))
            return None if name.startswith("sync") else real(fs, *arguments)

        return call

    for name in ("create", "write", "sync", "size", "replace", "sync_folder", "leftovers", "remove", "make_folder"):
        setattr(fs, name, wrapped(name))
    return fs


def removed(path: Path) -> None:
    FileSystem().remove(path)


@pytest.mark.parametrize(("error", "existing"), [(None, True), (None, False), (errno.ENOSPC, True)])
@pytest.mark.parametrize("form", [zarr_store, zarr_zip, torch_file])
def test_a_fault_at_any_call_leaves_the_old_or_the_new_state(form, error, existing, make_state, same_state, tmp_path):
    suffix = {zarr_store: ".zarr", zarr_zip: ".zarr.zip", torch_file: ".pt"}[form]
    path = tmp_path / f"a{suffix}"
    old, new = (replace(make_state(), tensors={"a": torch.arange(n), "b": torch.ones(3)}) for n in (5, 6))
    count = failing(0, None)
    if existing:
        form.save(old, path)
    form.save(new, path, fs=count)
    committed = []
    for n in range(1, count.calls + 1):
        removed(path)
        if existing:
            form.save(old, path, fs=failing(0, None))
        expected = Killed if error is None else StateError
        # What a zarr store removes after the commit may fail: the state is in place.
        with contextlib.suppress(expected) if form is zarr_store else pytest.raises(expected):
            form.save(new, path, fs=failing(n, error))
        committed.append(path.exists() and _is(path, new, same_state))
        if committed[-1]:
            assert same_state(load(path), new)
        elif existing:
            assert same_state(load(path), old)
        else:
            with pytest.raises(StateNotFound):
                load(path)
        save(new, path)
        assert same_state(load(path), new)
        assert not list(tmp_path.glob(".*"))
    # Once the new state is in place it stays.
    assert committed == sorted(committed)
    assert committed[-1]
    assert not committed[0]


def _is(path: Path, state, same_state) -> bool:
    try:
        return same_state(load(path), state)
    except StateNotFound:
        return False


class Flaky(Remote):
    """An object store whose n-th put fails."""

    def __init__(self, url: str, at: int) -> None:
        super().__init__(url)
        self.left, self.guard = at, threading.Lock()

    def commit(self, key: str, value: bytes) -> None:
        with self.guard:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, "the store is gone")
        super().commit(key, value)


def test_a_put_that_fails_leaves_the_old_state_in_the_store(at, make_state, same_state):
    path, old, new = at(PLACES[4]), make_state(seed=1), make_state(seed=2)
    save(old, path)
    for n in itertools.count(1):
        flaky = Flaky(path, n)
        try:
            zarr_store.save(new, path, place=flaky)
        except StateError:
            assert same_state(load(path), old)
        else:
            break
    # Three tensors and the document differ, and the last put is the commit.
    assert n > 4
    assert same_state(load(path), new)


def test_the_document_is_the_last_thing_that_is_put(make_state, at):
    class Noting(Remote):
        def commit(self, key: str, value: bytes) -> None:
            noted.append(key)
            super().commit(key, value)

    noted: list[str] = []
    path = at(PLACES[4])
    zarr_store.save(make_state(), path, place=Noting(path))
    assert noted[-1] == "zarr.json"
    assert noted.count("zarr.json") == 1


def test_everything_is_synced_before_the_commit(make_state, tmp_path):
    order, opened = [], {}

    class Noting(FileSystem):
        def create(self, path):
            file = super().create(path)
            opened[file.fileno()] = path
            order.append(("create", path))
            return file

        def sync(self, file):
            order.append(("sync", opened[file.fileno()]))
            super().sync(file)

        def replace(self, source, target):
            order.append(("replace", target))
            super().replace(source, target)

        def sync_folder(self, folder):
            order.append(("sync", folder))
            super().sync_folder(folder)

    path = tmp_path / "a.zarr"
    zarr_store.save(make_state(), path, fs=Noting())
    commit = order.index(("replace", path / "zarr.json"))
    made = {target for what, target in order[:commit] if what == "create"}
    synced = {target for what, target in order[:commit] if what == "sync"}
    assert made <= synced
    assert {p.parent for p in made if p.parent.parent.name == "pieces"} | {path / "pieces", path, tmp_path} <= synced


@pytest.mark.parametrize("content", ["file", "folder", "other zarr", "damaged"])
def test_what_is_no_state_of_ours_is_never_overwritten(content, make_state, tmp_path):
    path = tmp_path / "a.zarr"
    if content == "file":
        path.write_text("mine")
    elif content == "folder":
        path.mkdir()
        (path / "mine.txt").write_text("mine")
    elif content == "other zarr":
        zarr.create_group(path)
    else:
        save(make_state(), path)
        (path / "zarr.json").write_bytes((path / "zarr.json").read_bytes()[:-9])
    before = sorted(path.rglob("*"))
    for refuse in (check_target, lambda p: save(make_state(), p), lambda p: zarr_store.save(make_state(), p)):
        with pytest.raises(StateError, match=r"a\.zarr"):
            refuse(path)
    assert sorted(path.rglob("*")) == before


def test_nothing_is_written_or_removed_through_a_link_to_elsewhere(make_state, tmp_path):
    path, elsewhere = tmp_path / "a.zarr", tmp_path / "mine"
    save(make_state(), path)
    (path / "pieces").rename(elsewhere)
    (elsewhere / ("0" * 64)).mkdir()
    (path / "pieces").symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    with pytest.raises(StateError, match="link"):
        save(make_state(seed=5), path)
    assert sorted(elsewhere.rglob("*")) == before


def test_a_zip_of_the_largest_kind_is_read(make_state, same_state, tmp_path, monkeypatch):
    # As if every size and place took more than 32 bits.
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    save(make_state(), tmp_path / "a.zarr.zip")
    assert b"PK\6\6" in (tmp_path / "a.zarr.zip").read_bytes()
    assert same_state(load(tmp_path / "a.zarr.zip"), make_state())


def test_torch_reads_the_file_and_its_tensors_stand_alone(make_state, tmp_path):
    state = make_state()
    save(state, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert set(found) == {"protokv", "tensors"}
    assert all(found["tensors"][name].equal(tensor) for name, tensor in state.tensors.items())


def test_other_files_of_torch_and_zips_are_said_to_be_no_state(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pt")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("hello.txt", "hello")
    (tmp_path / "b.pt").write_bytes(buffer.getvalue())
    (tmp_path / "c.zarr.zip").write_bytes(buffer.getvalue())
    zarr.create_group(tmp_path / "d.zarr")
    for name in ("a.pt", "b.pt", "c.zarr.zip", "d.zarr"):
        for read in (load, read_header):
            with pytest.raises(StateCorrupt, match=r"state"):
                read(tmp_path / name)
