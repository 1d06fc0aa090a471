"""Every form keeps a state bit for bit, has one writer, replaces nothing else, and shows readers
only whole states.
"""

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from protokv.core.tensors import TensorSpec
from protokv.errors import StateError, StateNotFound, UnknownForm
from protokv.state.checkpoint import save_state
from protokv.state.header import DTYPE_NAMES
from protokv.state.reader import StateReader, load_state
from protokv.state.store import find_store
from protokv.texts import JsonObject
from tests.state.conftest import EVERY_FORM, make, moment, names, same

DTYPES = list(DTYPE_NAMES)


@EVERY_FORM
@pytest.mark.parametrize("mode", [0o640, 0o600, 0o664])
def test_the_mode_and_the_group_of_a_state_stay_through_commits(path: Path, mode: int) -> None:
    save_state(make(), path)
    folder = path.is_dir()
    path.chmod(mode | (0o110 if folder else 0))
    # Root alone may give a file to anybody.
    group = 12345 if os.geteuid() == 0 else os.getegid()
    os.chown(path, -1, group)
    save_state(make(seed=1), path)
    files = [one for one in path.rglob("*") if one.is_file()] if folder else [path]
    assert {stat.S_IMODE(one.stat().st_mode) for one in files} == {mode}
    assert {one.stat().st_gid for one in (path, *files)} == {group}


@EVERY_FORM
def test_every_dtype_comes_back_bit_for_bit_with_its_header(path: Path) -> None:
    whole = torch.arange(60.0).reshape(3, 4, 5)
    made = {
        f"all.{dtype}".replace("torch.", ""): torch.arange(24).reshape(2, 3, 4).to(dtype)
        for dtype in DTYPES
    }
    made |= {"none": torch.empty(3, 0, 2), "scalar": torch.tensor(7.5), "truth": torch.tensor(True)}
    made |= {"odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]), "void": torch.empty(0)}
    # Views and shared storages come back apart, and may be written to.
    made |= {
        "a": whole.transpose(0, 2),
        "b": whole[:, 1],
        "c": whole,
        "d": whole,
        "e": whole[:1].expand(3, 4, 5),
    }
    state = make(tensors=made, complete=True)
    assert (
        save_state(state, path)
        == StateReader.open(path).file_bytes
        > sum(tensor.nbytes for tensor in made.values())
    )
    found = load_state(path)
    assert same(found, state)
    assert same(load_state(path, verify=False), state)
    found.tensors["c"].zero_()
    assert found.tensors["d"].equal(whole)
    assert same(load_state(path), state)


@EVERY_FORM
def test_the_same_state_gives_the_same_bytes_in_any_order(suffix: str, tmp_path: Path) -> None:
    state = make()
    tensors = dict(reversed([*state.tensors.items()]))
    memory = dict(reversed([*state.memory.items()]))
    for name, one in (("a", state), ("b", replace(state, tensors=tensors, memory=memory))):
        save_state(one, tmp_path / f"{name}{suffix}")
    a, b = (
        [file.read_bytes() for file in sorted([one, *one.rglob("*")]) if file.is_file()]
        for one in (tmp_path / f"a{suffix}", tmp_path / f"b{suffix}")
    )
    assert a == b


UNREADABLE: list[tuple[JsonObject, str]] = [
    ({"memory": {"rate": float("inf")}}, "JSON"),
    ({"settings": {"what": object()}}, "JSON"),
    ({"settings": {"long": "x" * (5 << 20)}}, "bytes"),
    ({"tensors": {"z": torch.zeros(2, dtype=torch.complex64)}}, "tensor z"),
    ({"tensors": {"../z": torch.zeros(2)}}, "not a name"),
    ({"tensors": {"": torch.zeros(2)}}, "not a name"),
]


@EVERY_FORM
def test_an_unreadable_state_is_not_written_and_a_missing_one_not_found(path: Path) -> None:
    for read in (load_state, StateReader.open, lambda path: load_state(path, at_s=9.0)):
        with pytest.raises(StateNotFound, match="no state at"):
            read(path)
    save_state(make(), path)
    for change, match in UNREADABLE:
        with pytest.raises(StateError, match=match):
            save_state(make(**change), path)
    assert same(load_state(path), make())


@EVERY_FORM
def test_readers_beside_a_writer_only_ever_see_whole_states(path: Path) -> None:
    states = [make(seed=seed) for seed in range(4)]
    save_state(states[0], path)
    wrong: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                found = load_state(path)
            except StateError as error:
                wrong.append(error)
            else:
                wrong.extend([] if any(same(found, state) for state in states) else [found])

    reader = threading.Thread(target=read)
    reader.start()
    with find_store(path) as store:
        for n in range(8):
            store.commit(states[n % 4])
    done.set()
    reader.join()
    assert not wrong


@EVERY_FORM
def test_a_commit_follows_the_umask_and_leaves_other_files_alone(
    path: Path, tmp_path: Path
) -> None:
    kept = [
        f".{path.name}.note",
        "b.safetensors.x.partial",
        ".b.safetensors.1-2.partial",
        f"{path.name}.bak",
    ]
    for name in kept:
        (tmp_path / name).write_text("mine")
    (tmp_path / f".{path.name}.partial").write_text("left by a killed commit")
    before = os.umask(0o027)
    try:
        for seed in range(2):
            save_state(make(seed=seed), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640)
    assert same(load_state(path), make(seed=1))
    assert names(tmp_path) == sorted([*kept, path.name])
    assert all((tmp_path / name).read_text() == "mine" for name in kept)


def test_a_place_where_no_state_can_be_is_one_error(tmp_path: Path) -> None:
    for name in ["a.npz", "a", "zarr"]:
        with pytest.raises(UnknownForm, match="safetensors"):
            save_state(make(), tmp_path / name)
    with pytest.raises(UnknownForm, match="is a video, not a state"):
        load_state("talk.mp4")
    (tmp_path / "no").touch()
    with pytest.raises(StateError, match=r"cannot write the state .*no/a\.safetensors: ") as caught:
        save_state(make(), tmp_path / "no" / "a.safetensors")
    assert caught.value.hint == "a part of its path is a file: choose another folder"
    save_state(make(), tmp_path / "new" / "er" / "a.safetensors")


def test_a_zarr_folder_of_others_is_not_replaced_and_an_empty_or_damaged_one_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.zarr"
    path.mkdir()
    with pytest.raises(StateNotFound):
        load_state(path)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(StateError, match=r"no \.zarr of ours"):
        save_state(make(), path)
    (path / "notes.txt").unlink()
    save_state(make(), path)
    (path / "bank" / "mass" / "c.0.0.0").unlink()
    save_state(make(seed=3), path)
    assert same(load_state(path), make(seed=3))


AXES = ("layer", "kv_head", "prototype")
SPECS = (TensorSpec("bank.mass", AXES, (2, 3, 11), torch.float32, "tokens in it", "tokens"),)


def test_other_programs_read_every_array_of_a_zarr_under_its_own_name(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    state = make(specs=SPECS)
    path = tmp_path / "a.zarr"
    save_state(state, path)
    group: Any = zarr.open_group(path, mode="r")
    for name, tensor in state.tensors.items():
        array = group[name.replace(".", "/")]
        expected = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        assert array.attrs.get("torch_dtype") == (
            "bfloat16" if tensor.dtype == torch.bfloat16 else None
        )
        np.testing.assert_array_equal(array[...], expected.numpy())
    assert group["near/step"].metadata.dimension_names == ("step_0",)
    assert dict(group["bank/mass"].attrs) == {"long_name": "tokens in it", "units": "tokens"}
    assert set(group.group_keys()) == {"near", "bank", "residual", "warmup"}
    assert group.attrs["protokv"]["header"]["clock"]["steps"] == 5
    with xarray.open_zarr(path, group="bank", consolidated=False) as found:
        assert found["mass"].dims == AXES


@pytest.mark.parametrize("keep", [None, 3])
@EVERY_FORM
def test_a_reader_at_any_moment_of_a_commit_sees_a_whole_state(
    path: Path, keep: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [moment(step) for step in range(1, 7)]
    move = Path.replace
    seen = 0

    def look(old: Path, new: Path) -> Path:
        nonlocal seen
        assert any(same(load_state(path), state) for state in states)
        moved = move(old, new)
        assert any(same(load_state(path), state) for state in states)
        seen += 1
        return moved

    save_state(states[0], path)
    with find_store(path, keep=keep) as store:
        monkeypatch.setattr(Path, "replace", look)
        for state in states[1:]:
            store.commit(state)
        monkeypatch.undo()
    assert seen >= 5
    assert len(StateReader.open(path).commits_s) == (keep or 1)
