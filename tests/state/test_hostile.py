"""A state from anywhere is data: whatever its bytes are, it loads as it was saved or ends in one
clear error.

Nothing in it runs, and nothing is allocated because it claims a size.
"""

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from protokv.errors import StateCorrupt, StateMismatch
from protokv.state.checkpoint import save_state
from protokv.state.describe import convert_state, describe_state
from protokv.state.header import FORMAT_VERSION, digest_document, make_canonical_json
from protokv.state.reader import StateReader, load_state, read_thumbnails
from protokv.state.store import STATE_FORMS
from tests.state.conftest import EVERY_FORM, make, same

Json = dict[str, Any]
RAN = "ran"
BIG = (1 << 45).to_bytes(6, "little")


class Evil:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (RAN,)


def resealed(document: Json) -> Json:
    """Return a document with the digest that fits it."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    return {**rest, "digest": digest_document(rest)}


def in_document(field: str, change: Callable[[Json], object]) -> Callable[[Path], None]:
    """Change a field of the document of a .safetensors file and seal it again."""

    def act(path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        head = json.loads(data[8 : 8 + length])
        document = json.loads(head["__metadata__"]["protokv"])
        change(document[field])
        head["__metadata__"]["protokv"] = make_canonical_json(resealed(document))
        text = json.dumps(head).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return act


def in_file(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def in_pickle(content: object) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


def in_opcodes(pickle: bytes, compression: int = zipfile.ZIP_STORED) -> Callable[[Path], None]:
    """Put these opcodes in place of the pickle, as torch.save names it."""

    def act(path: Path) -> None:
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("archive/data.pkl", pickle)
            archive.writestr("archive/version", "3\n")

    return act


def in_array(change: Callable[[Json], object], name: str = "bank/mass") -> Callable[[Path], None]:
    def act(path: Path) -> None:
        file = path / name / "zarr.json"
        metadata = json.loads(file.read_text())
        change(metadata)
        file.write_text(json.dumps(metadata))

    return act


def lead_out(root: Json) -> None:
    document = root["attributes"]["protokv"]
    document["digests"]["../../etc"] = "0"
    root["attributes"]["protokv"] = resealed(document)


def outside(path: Path, file: str) -> None:
    """Move a part of a folder elsewhere, and leave a link."""
    elsewhere = path.with_name("elsewhere")
    shutil.move(path / file, elsewhere)
    (path / file).symlink_to(elsewhere)


def shard(array: Json) -> None:
    inner = {"chunk_shape": [2, 3, 11], "codecs": array["codecs"], "index_codecs": array["codecs"]}
    array["codecs"] = [{"name": "sharding_indexed", "configuration": inner}]


def pipe(path: Path) -> None:
    (path / "bank/mass/c.0.0.0").unlink()
    os.mkfifo(path / "bank/mass/c.0.0.0")


ANY_FILE = {
    "empty": in_file(lambda data: b""),
    "cut": in_file(lambda data: data[: len(data) // 2]),
    "another file": in_file(lambda data: b"\x89PNG" + os.urandom(3000)),
}
HOSTILE: dict[str, dict[str, Callable[[Path], Any]]] = {
    ".safetensors": ANY_FILE
    | {
        "longer": in_file(lambda data: data + b"x"),
        "length beyond the file": in_file(lambda data: (2**40).to_bytes(8, "little") + data[8:]),
        "no document": lambda path: save_file({"a": torch.zeros(3)}, path),
        "a tensor without a digest": in_document("digests", lambda digests: digests.pop("offset")),
        "another digest": in_document(
            "digests", lambda digests: digests.update({"offset": "0" * 32})
        ),
        "a newer version": in_document(
            "header", lambda header: header.update(format_version=FORMAT_VERSION + 1)
        ),
        "a steps of text": in_document("header", lambda header: header["clock"].update(steps="9")),
        "half of a character in a record": in_document(
            "header", lambda header: header["source"].update(notes=[{"text": "\udd00"}])
        ),
        "a document of two megabytes": in_document(
            "header", lambda header: header["settings"].update(note="x" * (2 << 20))
        ),
        "a revision with a path": in_document(
            "header", lambda header: header["backbone"].update(revision="../" * 14)
        ),
    },
    ".pt": ANY_FILE
    | {
        "code": in_pickle({"protokv": Evil(), "tensors": {}}),
        "a plain pickle": lambda path: path.write_bytes(pickle.dumps(Evil())),
        "more than all memory": in_opcodes(
            b"\x80\x02cbuiltins\nbytearray\n\x8a\x06" + BIG + b"\x85R."
        ),
        "a key that takes years to hash": in_opcodes(
            b"\x80\x02})q\0" + b"h\0h\0\x86q\0" * 90 + b"Ns."
        ),
        "a place of the memo for each byte of memory": in_opcodes(b"\x80\x02}r\xff\xff\xff\xff."),
        "an integer of a million digits": in_opcodes(b"\x80\x02I" + b"9" * 1_000_000 + b"\n."),
        "much text in few bytes": in_opcodes(b"\x80\x02" + b"N" * (64 << 20), zipfile.ZIP_DEFLATED),
        "no state": in_pickle({"weights": torch.zeros(3)}),
        "a strided tensor": in_pickle(
            {"protokv": "", "tensors": {"a": torch.zeros(1).expand(1 << 40)}}
        ),
    },
    ".zarr": {
        "no root": lambda path: (path / "zarr.json").unlink(),
        "no chunk": lambda path: (path / "bank/mass/c.0.0.0").unlink(),
        "another chunk": lambda path: (path / "bank/mass/c.0.0.0").write_bytes(b"\1" * 264),
        "compressed": in_array(
            lambda m: m["codecs"].append({"name": "gzip", "configuration": {"level": 1}})
        ),
        "shards": in_array(shard),
        "a group": in_array(lambda m: m.pop("shape") and m.update(node_type="group")),
        "many axes": in_array(lambda m: m.update(shape=[1] * 9000, dimension_names=None)),
        "big-endian": in_array(lambda m: m["codecs"][0]["configuration"].update(endian="big")),
        "a huge shape": in_array(lambda m: m.update(shape=[2, 3, 2**39])),
        "an unknown type": in_array(lambda m: m.update(data_type="complex64")),
        "smaller chunks": in_array(
            lambda m: m["chunk_grid"]["configuration"].update(chunk_shape=[1, 1, 1])
        ),
        "a name that leads out": in_array(lead_out, ""),
        "a link to a folder": partial(outside, file="bank"),
        "a link to a chunk": partial(outside, file="bank/mass/c.0.0.0"),
        "a pipe": pipe,
    },
}
READS: tuple[Callable[[Path], object], ...] = (
    lambda path: StateReader.open(path).commits_s,
    describe_state,
    read_thumbnails,
    lambda path: convert_state(path, "b.pt"),
)


@pytest.fixture(
    params=[(suffix, name) for suffix, known in HOSTILE.items() for name in known], ids=str
)
def hostile(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(tmp_path)
    suffix, name = request.param
    save_state(make(), path := tmp_path / f"a{suffix}")
    HOSTILE[suffix][name](path)
    return path


def test_a_hostile_state_is_one_error_that_names_it_and_runs_nothing(hostile: Path) -> None:
    with pytest.raises((StateCorrupt, StateMismatch)) as caught:
        load_state(hostile)
    message = caught.value.message
    assert message.startswith(str(hostile))
    assert message.isascii()
    assert not (hostile / "zarr.json").exists() or ": tensor " in message
    assert "\n" not in message
    assert len(message) < len(str(hostile)) + 300
    for read in READS:
        with suppress(StateCorrupt, StateMismatch):
            read(hostile)
    assert not Path(RAN).exists()


@EVERY_FORM
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_bytes_never_load_as_another_state(
    suffix: str, data: st.DataObject, tmp_path: Path
) -> None:
    whole = tmp_path / f"whole{suffix}"
    path = tmp_path / f"a{suffix}"
    if not whole.exists():
        save_state(make(), whole)
    if path.is_dir():
        shutil.rmtree(path)
    (shutil.copytree if whole.is_dir() else shutil.copy)(whole, path)
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    file = data.draw(st.sampled_from(files))
    old = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(old)))
    until = data.draw(st.integers(at, min(len(old), at + 40)))
    file.write_bytes(old[:at] + data.draw(st.binary(max_size=40)) + old[until:])
    for verify in (True, False):
        with suppress(StateCorrupt, StateMismatch):
            found = load_state(path, verify=verify)
            assert same(found, make()) or not verify


assert HOSTILE.keys() == STATE_FORMS.keys()
