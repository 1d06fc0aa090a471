"""Damaged and hostile states of every form: one StateError each, no code run, no memory beyond the file's size."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from protokv.core.digest import bytes_digest, canonical
from protokv.core.snapshot import FORMAT_VERSION
from protokv.errors import StateCorrupt, StateError, StateMismatch
from protokv.storage.api import load_state, read_header, save_state
from protokv.storage.form import FORMS
from tests.storage.mutations import resealed, unzipped, zipped

SUFFIXES = list(FORMS)
FILES = [suffix for suffix in SUFFIXES if suffix != ".zarr"]


@pytest.fixture(scope="module")
def good(make_state, tmp_path_factory):
    """A state in every form, by suffix."""
    folder = tmp_path_factory.mktemp("good")
    for suffix in SUFFIXES:
        save_state(make_state(), folder / f"a{suffix}")
    return {suffix: folder / f"a{suffix}" for suffix in SUFFIXES}


def refused(path: Path, match: str | None = None) -> StateError:
    tracemalloc.start()
    try:
        with pytest.raises(StateError, match=match) as caught:
            load_state(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in caught.value.message
    with pytest.raises(StateError):
        read_header(path)
    return caught.value


def refused_in(path: Path) -> StateError:
    with pytest.raises(StateCorrupt) as caught:
        load_state(path)
    return caught.value


def run_limited(seed: int, count: int) -> dict[str, dict[str, int]]:
    """Mutated states of every form, loaded in a process with 256 MiB to spare."""
    command = [sys.executable, "-m", "tests.storage.mutations", str(seed), str(count), *SUFFIXES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["grown_kib"] < 64 << 10
    return result["counts"]


def check_counts(counts: dict[str, dict[str, int]], count: int) -> None:
    for found in counts.values():
        assert sum(found.values()) == count
        assert found["refused"] > count / 2
        assert found["equal"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_mutated_states_are_refused_or_load_equal_without_code_or_memory():
    check_counts(run_limited(0, 100), 100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_twenty_thousand_mutated_states_are_refused_or_load_equal():
    check_counts(run_limited(1, 5000), 5000)


@pytest.mark.parametrize("suffix", FILES)
def test_every_cut_of_a_file_is_refused(suffix, good, tmp_path):
    data, path = good[suffix].read_bytes(), tmp_path / f"a{suffix}"
    for size in [*range(0, len(data), 97), *range(len(data) - 9, len(data))]:
        path.write_bytes(data[:size])
        with pytest.raises(StateError):
            load_state(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_flipped_bit_in_a_tensor_is_found_and_the_tensor_named(suffix, make_state, tmp_path):
    state, path = (
        make_state(tensors={"bank.mass": torch.full((9,), 3.0), "other": torch.zeros(4)}),
        tmp_path / f"a{suffix}",
    )
    needle = state.tensors["bank.mass"].numpy().tobytes()
    save_state(state, path)
    (file,) = [p for p in ([path] if path.is_file() else path.rglob("c.0")) if needle in p.read_bytes()]
    data = file.read_bytes()
    for at in range(data.index(needle), data.index(needle) + len(needle), 5):
        file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(StateCorrupt, match=r"tensor bank\.mass"):
            load_state(path)
        # Who is in a hurry gets what is there.
        assert not load_state(path, verify=False).tensors["bank.mass"].equal(state.tensors["bank.mass"])


def newer(text: str) -> str:
    document = json.loads(text)
    document["header"] |= {"format_version": FORMAT_VERSION + 5, "created_by": "protokv 9.1", "novel": 1}
    return canonical(resealed(document))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_newer_format_is_refused_with_both_versions(suffix, good, tmp_path):
    path = tmp_path / f"a{suffix}"
    if suffix == ".zarr":
        shutil.copytree(good[suffix], path)
        group = json.loads((path / "zarr.json").read_text())
        group["attributes"]["protokv"] = json.loads(newer(json.dumps(group["attributes"]["protokv"])))
        (path / "zarr.json").write_text(json.dumps(group))
    elif suffix == ".pt":
        content = torch.load(good[suffix], weights_only=True)
        torch.save(content | {"protokv": newer(content["protokv"])}, path_file := io.BytesIO())
        path.write_bytes(path_file.getvalue())
    else:
        data = good[suffix].read_bytes()
        length = int.from_bytes(data[:8], "little")
        outer = json.loads(data[8 : 8 + length])
        outer["__metadata__"]["protokv"] = newer(outer["__metadata__"]["protokv"])
        head = json.dumps(outer).encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])
    error = refused(path, f"reads {FORMAT_VERSION}, the state has {FORMAT_VERSION + 5}")
    assert isinstance(error, StateMismatch)
    assert "protokv 9.1" in error.hint


# Files of torch


def test_a_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "a.pt"
    for name in ("archive/data.pkl", "archive/data/0"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, b"0" * (100 << 20))
        assert path.stat().st_size < 1 << 20
        refused(path, "compressed or encrypted")


def test_a_second_pickle_is_refused(good, tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(zipped({"x/data.pkl": b"\x80\x02}.", **unzipped(good[".pt"].read_bytes())}))
    refused(path, "one short pickle")


# Pickles


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/protokv-was-run",)


HOSTILE_PICKLES = {
    "code": pickle.dumps(Evil(), 2),
    "code in the tensors": pickle.dumps({"protokv": "{}", "tensors": {"a": Evil()}}, 2),
    "bytearray of a terabyte": pickle.dumps({"protokv": "{}"}, 2)[:-1]
    + b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "tensor of a terabyte": b"\x80\x02ctorch\nFloatTensor\nJ\xff\xff\xff\x7f\x85R.",
    "memo of a terabyte": b"\x80\x02}r\xff\xff\xff\x7f.",
    "long": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "text of two gigabytes": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "protocol 5": pickle.dumps({"protokv": "{}", "tensors": {}}, 5),
    "protocol 0": pickle.dumps({"protokv": "{}", "tensors": {}}, 0),
    "empty": b"",
    "no stop": b"\x80\x02}",
    "underflow": b"\x80\x02\x86.",
    "mark left": b"\x80\x02(}.",
    "deep": b"\x80\x02)" + b"\x85" * 100000 + b".",
    "itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "twice": b"\x80\x02}(X\x01\x00\x00\x00a)X\x01\x00\x00\x00a)u.",
    "unhashable": b"\x80\x02}}}s.",
    "get what is not there": b"\x80\x02h\x07.",
    "reduce of a text": b"\x80\x02X\x01\x00\x00\x00a)R.",
    "persistent id of nothing": b"\x80\x02)Q.",
    "persistent id in text": b"\x80\x02Pabc\n.",
    "build": b"\x80\x02})b.",
    "odd items": b"\x80\x02}(X\x01\x00\x00\x00au.",
    "not a state": pickle.dumps({"a": 1}, 2),
    "a number": pickle.dumps(7, 2),
}


@pytest.mark.parametrize("program", HOSTILE_PICKLES.values(), ids=HOSTILE_PICKLES)
def test_a_pickle_that_is_not_that_of_a_state_is_refused_and_nothing_is_run(program, good, tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(zipped({**unzipped(good[".pt"].read_bytes()), "archive/data.pkl": program}))
    refused(path, "pickle|state")
    assert not Path("/tmp/protokv-was-run").exists()


def test_a_pickle_under_the_name_of_a_state_is_refused_and_not_run(tmp_path):
    for name, data in {
        "a.pt": pickle.dumps(Evil()),
        "b.pt": pickle.dumps(Evil(), 2),
        "c.safetensors": pickle.dumps(Evil()),
    }.items():
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name)
    torch.save({"protokv": "{}", "tensors": {"a": Evil()}}, buffer := io.BytesIO())
    (tmp_path / "d.pt").write_bytes(buffer.getvalue())
    refused(tmp_path / "d.pt", "refers to")
    torch.save({"a": 1}, tmp_path / "e.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "e.pt", "zip")
    (tmp_path / "f.pt").write_bytes(
        zipped({"archive/data.pkl": b"", "archive/code/__torch__.py": b"", "archive/byteorder": b"little"})
    )
    refused(tmp_path / "f.pt")
    assert not Path("/tmp/protokv-was-run").exists()


def patched(program: bytes, old: bytes, new: bytes, count: int = 1) -> bytes:
    assert old in program
    return program.replace(old, new, count)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"FloatStorage\n", b"UntypedStorage\n"),
        (b"torch FloatStorage".replace(b" ", b"\n"), b"torch\nDoubleStorage"),
        (b"_rebuild_tensor_v2", b"_rebuild_qtensor"),
        (b"X\x07\x00\x00\x00storage", b"X\x06\x00\x00\x00module"),
    ],
)
def test_a_storage_that_is_not_what_was_saved_is_refused(old, new, good, tmp_path):
    members = unzipped(good[".pt"].read_bytes())
    members["archive/data.pkl"] = patched(members["archive/data.pkl"], old, new)
    (tmp_path / "a.pt").write_bytes(zipped(members))
    refused_in(tmp_path / "a.pt")


def rebuilt(shape, elements, offset=0, stride=None, kind="FloatStorage", key="0"):
    """A pickle of one tensor that claims these sizes, as torch.save would write it."""

    class Persistent(pickle.Pickler):
        def persistent_id(self, thing):
            return ("storage", Kind, key, "cpu", elements) if isinstance(thing, Storage) else None

    class Storage:
        pass

    class Tensor:
        def __reduce__(self):
            steps = stride if stride is not None else tuple(1 for _ in shape)
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, steps, False, OrderedDict())

    Kind = getattr(torch, kind)
    out = io.BytesIO()
    Persistent(out, 2).dump({"protokv": "{}", "tensors": {"a": Tensor()}})
    return out.getvalue()


@pytest.mark.parametrize(
    "claim",
    [
        {"shape": (2**38,), "elements": 2**38},
        {"shape": (2**38,), "elements": 1, "stride": (0,)},
        {"shape": (4,), "elements": 4, "offset": 2},
        {"shape": (4,), "elements": 4, "offset": -4},
        {"shape": (-4,), "elements": -4},
        {"shape": (2**63, 2), "elements": 0},
        {"shape": (4,), "elements": 4, "stride": (2**39,)},
        {"shape": (4,), "elements": 4, "stride": (-1,)},
        {"shape": (1,) * 99, "elements": 1},
        {"shape": (4,), "elements": 4, "key": "../0"},
        {"shape": (4,), "elements": 4, "key": "1"},
        {"shape": (4,), "elements": 4, "kind": "DoubleStorage"},
    ],
    ids=str,
)
def test_a_tensor_that_claims_more_than_its_bytes_is_refused(claim, good, make_state, tmp_path):
    save_state(make_state(tensors={"a": torch.zeros(4)}), tmp_path / "a.pt")
    members = unzipped((tmp_path / "a.pt").read_bytes())
    text = next(a for op, a, _ in pickletools.genops(members["archive/data.pkl"]) if str(a).startswith('{"digest'))
    program = rebuilt(**claim)
    program = patched(program, b"X\x02\x00\x00\x00{}", b"X" + struct.pack("<L", len(text)) + text.encode())
    (tmp_path / "a.pt").write_bytes(zipped({**members, "archive/data.pkl": program}))
    tracemalloc.start()
    refused_in(tmp_path / "a.pt")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_the_pickle_that_the_last_test_builds_would_pass_if_it_told_the_truth(make_state, tmp_path):
    save_state(make_state(tensors={"a": torch.zeros(4)}), tmp_path / "a.pt")
    members = unzipped((tmp_path / "a.pt").read_bytes())
    text = next(a for op, a, _ in pickletools.genops(members["archive/data.pkl"]) if str(a).startswith('{"digest'))
    program = rebuilt((4,), 4)
    program = patched(program, b"X\x02\x00\x00\x00{}", b"X" + struct.pack("<L", len(text)) + text.encode())
    (tmp_path / "a.pt").write_bytes(zipped({**members, "archive/data.pkl": program}))
    assert load_state(tmp_path / "a.pt").tensors["a"].equal(torch.zeros(4))


# Zarr


def with_digests(path: Path, change) -> None:
    """The digests in the root document of a state in a folder, changed and sealed again."""
    group = json.loads((path / "zarr.json").read_text())
    document = group["attributes"]["protokv"]
    change(document["digests"])
    group["attributes"]["protokv"] = resealed(document)
    (path / "zarr.json").write_text(json.dumps(group))


def with_metadata(path: Path, change: dict) -> None:
    """The metadata of an array, changed; their digest is right."""
    file = path / "bank" / "mass" / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with_digests(path, lambda digests: digests.update({"bank/mass/zarr.json": bytes_digest(file.read_bytes())}))


def grid(*chunk_shape) -> dict:
    return {"name": "regular", "configuration": {"chunk_shape": chunk_shape}}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shape": [2, 3, 2**39]}, "missing"),
        ({"shape": [2, 3, 2**39], "chunk_grid": grid(2, 3, 2**39)}, "bytes instead of"),
        ({"shape": [2**39, 2**39, 2**39]}, "missing"),
        ({"shape": [2, 3, -11]}, "not those of a tensor"),
        ({"shape": [2, 3, 11.0]}, "not those of a tensor"),
        ({"shape": [1] * 40}, "not those of a tensor"),
        ({"shape": [2, 3], "chunk_grid": grid(2, 3)}, "missing|bytes instead of"),
        ({"shape": "2"}, "not those of a tensor"),
        ({"chunk_grid": grid(0, 3, 11)}, "cut like this"),
        ({"chunk_grid": grid(True, 3, 11)}, "not those of a tensor"),
        ({"chunk_grid": grid(2, 3, 2**70)}, "not those of a tensor"),
        ({"chunk_grid": grid(1, 1, 1)}, "missing"),
        ({"chunk_grid": grid(2, 3, 5)}, "bytes instead of"),
        ({"chunk_grid": grid(2, 3)}, "cut like this"),
        ({"chunk_grid": {**grid(2, 3, 11), "name": "rectangular"}}, "another chunk_grid"),
        ({"chunk_grid": 7}, "not those of a tensor"),
        ({"data_type": "float64"}, "bytes instead of"),
        ({"data_type": "object"}, "not those of a tensor"),
        ({"data_type": "uint16"}, "not those of a tensor"),
        ({"data_type": ["float32"]}, "not those of a tensor"),
        ({"codecs": [{"name": "evil"}]}, "another codecs"),
        ({"codecs": [{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 9}}]}, "another codecs"),
        ({"storage_transformers": [{"name": "evil"}]}, "another storage_transformers"),
        ({"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/../"}}}, "another|bytes instead"),
        ({"fill_value": "NaN"}, "another fill_value"),
        ({"fill_value": False}, "another fill_value"),
        ({"node_type": "both"}, "another node_type"),
        ({"zarr_format": 2}, "another zarr_format"),
        ({"must_understand": 1}, "another must_understand"),
        ({"attributes": 7}, "not those of a tensor"),
    ],
    ids=str,
)
def test_sealed_metadata_that_lie_are_refused_before_a_byte_is_decoded(change, match, good, tmp_path):
    path = tmp_path / "a.zarr"
    shutil.copytree(good[".zarr"], path)
    with_metadata(path, change)
    tracemalloc.start()
    with pytest.raises(StateCorrupt, match=match) as caught:
        load_state(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert "tensor bank.mass" in caught.value.message


def test_metadata_that_were_not_sealed_are_refused_even_in_a_hurry(good, tmp_path):
    path = tmp_path / "a.zarr"
    shutil.copytree(good[".zarr"], path)
    file = path / "bank" / "mass" / "zarr.json"
    file.write_text(file.read_text().replace("11", "10"))
    for verify in (True, False):
        with pytest.raises(StateCorrupt, match=r"tensor bank\.mass"):
            load_state(path, verify=verify)


@pytest.mark.parametrize(
    "key", ["../out/zarr.json", "/etc/x/zarr.json", "a/b/zarr.json", "/zarr.json", "bank/mass/c.9"]
)
def test_a_key_of_what_is_not_there_leads_nowhere(key, good, tmp_path, make_state, same_state):
    path = tmp_path / "a.zarr"
    shutil.copytree(good[".zarr"], path)
    with_digests(path, lambda digests: digests.update({key: digests["bank/mass/zarr.json"]}))
    if key.endswith("zarr.json"):
        assert "missing" in refused_in(path).message
    else:
        assert same_state(load_state(path), make_state())


def test_a_tensor_that_cannot_have_its_name_is_refused(good, tmp_path):
    path = tmp_path / "a.zarr"
    shutil.copytree(good[".zarr"], path)
    shutil.copytree(path / "bank" / "mass", path / "BANK" / "mass")
    with_digests(
        path, lambda digests: digests.update({f"BANK{key[4:]}": digests[key] for key in list(digests) if "mass" in key})
    )
    assert (
        "tensor BANK.mass: not a name" in refused_in(path).message
        or "bank.mass: not a name" in refused_in(path).message
    )


@pytest.mark.parametrize("key", ["node_type", "zarr_format", "attributes"])
def test_a_root_that_is_not_our_group_is_refused(key, good, tmp_path):
    path = tmp_path / "a.zarr"
    shutil.copytree(good[".zarr"], path)
    group = json.loads((path / "zarr.json").read_text())
    (path / "zarr.json").write_text(json.dumps({**group, key: "array"}))
    refused(path, "zarr version 3")


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "/nowhere", "zarr.json", "pipe", "huge", "folder"])
@pytest.mark.parametrize("place", ["zarr.json", "bank/mass/zarr.json", "bank/mass/c.0.0.0"])
def test_what_is_in_the_place_of_a_file_is_refused_and_not_waited_for(place, target, good, tmp_path):
    path = tmp_path / "a.zarr"
    shutil.copytree(good[".zarr"], path)
    file = path / place
    file.unlink()
    if target == "pipe":
        os.mkfifo(file)
    elif target == "folder":
        file.mkdir()
    elif target == "huge":
        with file.open("wb") as hole:
            hole.truncate(1 << 43)
    else:
        file.symlink_to(target)
    tracemalloc.start()
    with pytest.raises(StateError):
        load_state(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "root", [b"", b"[" * 60000, b'{"a":' * 60000, b'{"attributes":{"protokv":{}},"a":NaN}', b"7", b'{"attributes":7}']
)
def test_hostile_json_in_the_root_is_refused(root, good, tmp_path):
    path = tmp_path / "a.zarr"
    shutil.copytree(good[".zarr"], path)
    (path / "zarr.json").write_bytes(root)
    refused(path)


def test_a_name_in_a_hierarchy_is_shown_and_not_obeyed(good, tmp_path):
    path, evil = tmp_path / "a.zarr", "ev\n\x1b[31mil"
    shutil.copytree(good[".zarr"], path)
    (path / evil).mkdir()
    data = (path / "bank" / "mass" / "zarr.json").read_bytes()
    (path / evil / "zarr.json").write_bytes(data)
    with_digests(path, lambda digests: digests.update({f"{evil}/zarr.json": bytes_digest(data)}))
    message = refused_in(path).message
    assert "missing" in message
    assert message.isprintable()
