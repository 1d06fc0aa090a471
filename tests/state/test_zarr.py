"""The `.zarr` form: a hierarchy that any zarr library opens, replaced whole."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest
import torch
import zarr
from zarr.core import sync

from protokv import machine
from protokv.core.tensors import TensorSpec
from protokv.errors import StateError
from protokv.state import zarr as hierarchy
from protokv.state.api import check_target, load_state, save_state
from protokv.state.zarr import ZarrForm
from tests.state.form_tests import LocalFormTests, contents

_SLOT = ("layer", "kv_head", "prototype")
TENSOR_INFO = {
    "bank.mass": TensorSpec("bank.mass", _SLOT, (2, 3, 11), torch.float32, "tokens in it", "tokens"),
    "near.keys": TensorSpec(
        "near.keys", ("layer", "kv_head", "token", "feature"), (2, 3, 5, 7), torch.bfloat16, "keys"
    ),
    # Of another tensor; it is ignored.
    "near.step": TensorSpec("near.step", _SLOT, (2, 3, 11), torch.int64, "no such thing"),
}


class TestZarr(LocalFormTests):
    suffix = ".zarr"

    @pytest.mark.parametrize("chunk_bytes", [1 << 20, 100])
    def test_the_zarr_library_reads_every_tensor_under_its_own_name(self, chunk_bytes, at, make_state, monkeypatch):
        monkeypatch.setattr(hierarchy, "CHUNK_BYTES", chunk_bytes)
        state, path = make_state(tensor_info=TENSOR_INFO), at()
        save_state(state, path)
        group = zarr.open_group(path, mode="r")
        for name, tensor in state.tensors.items():
            array = group[name.replace(".", "/")]
            expected = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
            assert array.attrs.get("torch_dtype") == ("bfloat16" if tensor.dtype == torch.bfloat16 else None)
            assert array.compressors == ()
            np.testing.assert_array_equal(array[...], expected.numpy())
            assert array[...].dtype == expected.numpy().dtype
        assert group["near/keys"].metadata.dimension_names == ("layer", "kv_head", "token", "feature")
        assert group["near/step"].metadata.dimension_names == ("step_0",)
        assert dict(group["bank/mass"].attrs) == {"long_name": "tokens in it", "units": "tokens"}
        assert set(group.group_keys()) == {"near", "bank", "residual", "warmup"}
        assert group.attrs["protokv"]["header"]["clock"]["steps"] == 5

    def test_xarray_opens_a_group(self, at, make_state):
        xarray = pytest.importorskip("xarray")
        state, path = make_state(tensor_info=TENSOR_INFO), at()
        save_state(state, path)
        with xarray.open_zarr(path, group="bank", consolidated=False) as found:
            np.testing.assert_array_equal(found["mass"].values, state.tensors["bank.mass"].numpy())
            assert found["mass"].dims == ("layer", "kv_head", "prototype")

    def test_a_thread_without_room_to_begin_is_an_error_and_nobody_waits_for_it(self, at, make_state, monkeypatch):
        monkeypatch.setattr(sync, "loop", [None])
        monkeypatch.setattr(sync, "iothread", [None])
        monkeypatch.setattr(threading.Thread, "start", machine._start_where_is_room)
        monkeypatch.setattr(machine, "_THREAD_BYTES", 1 << 60)
        state, path = make_state(), at()
        for _ in range(2):
            with pytest.raises(StateError, match="Cannot allocate memory") as refused:
                save_state(state, path)
            assert "ulimit -v" in refused.value.hint
        monkeypatch.setattr(machine, "_THREAD_BYTES", 1 << 20)
        save_state(state, path)
        load_state(path)
        sync.loop[0].call_soon_threadsafe(sync.loop[0].stop)
        sync.iothread[0].join()
        sync.loop[0].close()

    @pytest.mark.parametrize("file", ["bank/mass/c.0.0.0", "bank/mass/zarr.json", "zarr.json"])
    def test_a_damaged_state_is_healed_by_writing_it_again(self, file, at, make_state, same_state):
        path = at()
        save_state(make_state(), path)
        (path / file).write_bytes((path / file).read_bytes()[:-9])
        with pytest.raises(StateError):
            load_state(path)
        save_state(make_state(), path)
        assert same_state(load_state(path), make_state())

    @pytest.mark.parametrize("content", ["file", "folder", "other zarr", "a note in a state"])
    def test_foreign_files_are_never_overwritten(self, content, at, make_state):
        path = at()
        if content == "file":
            path.write_text("mine")
        elif content == "folder":
            path.mkdir()
            (path / "mine.txt").write_text("mine")
        elif content == "other zarr":
            zarr.create_group(path)
        else:
            save_state(make_state(), path)
            (path / "bank" / "note.txt").write_text("mine")
        before = sorted(path.rglob("*"))
        for refuse in (
            check_target,
            lambda p: save_state(make_state(), p),
            lambda p: ZarrForm(p).replace(make_state()),
        ):
            with pytest.raises(StateError, match=r"a\.zarr"):
                refuse(path)
        assert sorted(path.rglob("*")) == before

    def test_nothing_is_read_written_or_removed_through_a_link_inside(self, at, make_state, same_state, tmp_path):
        path, elsewhere = at(), tmp_path / "mine"
        save_state(make_state(), path)
        shutil.copytree(path / "bank", elsewhere)
        shutil.rmtree(path / "bank")
        (path / "bank").symlink_to(elsewhere)
        before = contents(elsewhere)
        with pytest.raises(StateError, match="neither a file nor a folder"):
            load_state(path)
        save_state(make_state(seed=5), path)
        assert contents(elsewhere) == before
        assert all(one.stat().st_nlink == 1 for one in elsewhere.rglob("*") if one.is_file())
        assert same_state(load_state(path), make_state(seed=5))

    def test_a_reader_reads_again_if_the_state_was_replaced(self, at, make_state, same_state, monkeypatch):
        path, states, real = at(), iter((1, 2)), hierarchy._file_sizes
        save_state(make_state(seed=0), path)

        def files(*arguments):
            """Let another writer commit before the other files are read."""
            if (seed := next(states, None)) is not None:
                with monkeypatch.context() as nested:
                    nested.setattr(hierarchy, "_file_sizes", real)
                    save_state(make_state(seed=seed), path)
            return real(*arguments)

        monkeypatch.setattr(hierarchy, "_file_sizes", files)
        assert same_state(load_state(path), make_state(seed=2))
