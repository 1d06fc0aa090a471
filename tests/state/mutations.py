"""Hostile states of every form: for each form a table of mutations by name, which `test_hostile` runs.

A mutation alters a good state in place. `DOCUMENT` alters the sealed document and applies to every form; the others
alter what only one form has. The digests are right wherever a mutation needs to get past them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from protokv.errors import StateCorrupt, StateError, StateMismatch
from protokv.state.api import save_state
from protokv.state.digest import bytes_digest, canonical, document_digest, tensor_digest
from protokv.state.snapshot import FORMAT_VERSION
from tests.state.conftest import make

RAN = Path("/tmp/protokv-was-run")


@dataclass(frozen=True)
class Mutation:
    """A change to a good state, and the error that it must lead to."""

    change: Callable[[Path], object]
    match: str = "."
    error: type[StateError] = StateCorrupt


def resealed(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with the right digest."""
    rest = {k: v for k, v in document.items() if k != "digest"}
    return {**rest, "digest": document_digest(rest)}


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the head of a safetensors file and its tensors."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(head: bytes, body: bytes = b"") -> bytes:
    """Return a safetensors file of a head and tensors."""
    return len(head).to_bytes(8, "little") + head + body


def zipped(members: dict[str, bytes]) -> bytes:
    """Return a zip file of stored members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def unzipped(data: bytes) -> dict[str, bytes]:
    """Return the members of a zip file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def change_document(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the document of a state in any form, and seal it again."""

    def changed(text: str) -> str:
        document = json.loads(text)
        change(document)
        return canonical(resealed(document))

    def apply(path: Path) -> None:
        if path.suffix == ".zarr":
            group = json.loads((path / "zarr.json").read_text())
            group["attributes"]["protokv"] = json.loads(changed(json.dumps(group["attributes"]["protokv"])))
            (path / "zarr.json").write_text(json.dumps(group))
        elif path.suffix == ".pt":
            content = torch.load(path, weights_only=True)
            torch.save(content | {"protokv": changed(content["protokv"])}, path)
        else:
            head, body = split(path.read_bytes())
            head["__metadata__"]["protokv"] = changed(head["__metadata__"]["protokv"])
            path.write_bytes(joined(json.dumps(head).encode(), body))

    return apply


def _header(**fields: object) -> Callable[[Path], None]:
    return change_document(lambda document: document["header"].update(fields))


EVIL = "\x1b[31m\u202e\nevil"
NEWER = FORMAT_VERSION + 5

DOCUMENT = {
    "nested memory": Mutation(_header(memory={"a": [[[[[[[[[[[[1]]]]]]]]]]]]}), "memory"),
    # `test_schema` has a wrong type of every other field.
    "source": Mutation(_header(source=5), "source"),
    "settings": Mutation(_header(settings=None), "settings"),
    "version 0": Mutation(_header(format_version=0), "format_version"),
    "unknown field": Mutation(_header(**{EVIL: 1}), "evil"),
    "digests": Mutation(change_document(lambda document: document.update(digests=[])), "digests"),
    "newer": Mutation(
        _header(format_version=NEWER, created_by="protokv 9.1", novel=1),
        f"reads {FORMAT_VERSION}, the state has {NEWER}",
        StateMismatch,
    ),
}


# Safetensors


def _head(change: Callable[[dict[str, Any]], object], more: bytes = b"") -> Callable[[Path], None]:
    """Change the head and append to the tensors."""

    def apply(path: Path) -> None:
        head, body = split(path.read_bytes())
        change(head)
        path.write_bytes(joined(json.dumps(head).encode(), body + more))

    return apply


def _entry(**fields: object) -> Mutation:
    """Change the entry of a tensor."""
    return Mutation(_head(lambda head: head["bank.mass"].update(fields)))


def _twice(**fields: object) -> Mutation:
    """Name a tensor a second time."""

    def apply(path: Path) -> None:
        head, body = split(path.read_bytes())
        again = json.dumps({**head["offset"], **fields})
        path.write_bytes(joined((json.dumps(head)[:-1] + f', "offset": {again}}}').encode(), body))

    return Mutation(apply)


def _neither_true_nor_false(path: Path) -> None:
    head, body = split(path.read_bytes())
    begin, end = head["bank.alive"]["data_offsets"]
    body = body[:begin] + b"\x02" * (end - begin) + body[end:]
    path.write_bytes(joined(json.dumps(head).encode(), body))
    digest = tensor_digest("BOOL", (3,), torch.full((3,), 2, dtype=torch.uint8).numpy())
    change_document(lambda document: document["digests"].update({"bank.alive": digest}))(path)


def _header_of_another(path: Path) -> None:
    body = split(path.read_bytes())[1]
    save_state(make(seed=3), path)
    path.write_bytes(path.read_bytes()[: -len(body)] + body)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


class Evil:
    """Run a program when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {RAN}",)


HEADS = [
    b"", b"{}", b"[]", b"null", b'"text"', b"[" * 60000, b'{"a":' * 60000,
    b'{"__metadata__":{"protokv":"{}"}}', b'{"__metadata__":{"protokv":"[]"}}',
    b'{"__metadata__":{"protokv":"' + b"[" * 60000 + b'"}}',
    b'{"__metadata__":{"protokv":7}}', b'{"__metadata__":7}', b'{"__metadata__":{"protokv":"{}","protokv":"{}"}}',
    b'{"__metadata__":{"protokv":"{}"},"a":NaN}', b'{"__metadata__":{"protokv":"{}"},"a":1' + b"0" * 9000 + b"}",
    b'{"__metadata__":{"protokv":"\\ud800"}}', b'\xff\xfe{"a":1}', b'{"format":"pt"}',
]  # fmt: skip

SAFETENSORS = {
    **{f"head {n}": Mutation(_write(joined(head))) for n, head in enumerate(HEADS)},
    **{
        f"length {n}": Mutation(lambda path, n=n: path.write_bytes(n.to_bytes(8, "little") + path.read_bytes()[8:]))
        for n in (0, 1, 2**20 + 1, 2**31, 2**63, 2**64 - 1)
    },
    **{
        f"shape {str(shape)[:40]}": _entry(shape=shape)
        for shape in (
            [2, 3, 12], [2, 3, -11], [2, 3, 1e1], [True, 3, 22], [2**62, 2**62, 0], [2**32, 2**32, 66], [1] * 100,
            "2", [3, 2, 11], [3, 2, 11, 1],
        )
    },
    **{f"dtype {dtype}": _entry(dtype=dtype) for dtype in ("I32", "F4", ["F32"])},
    "dtype and shape": _entry(dtype="F8_E4M3", shape=[2, 3, 44]),
    **{
        f"offsets {offsets}": _entry(data_offsets=offsets)
        for offsets in ([0, 2**60], [-264, 0], [264, 0], [0, 264], None)
    },
    **{f"twice {fields}": _twice(**fields) for fields in ({"dtype": "F64"}, {"shape": [1]}, {"data_offsets": [0, 8]})},
    "tensor left out": Mutation(_head(lambda head: head.pop("warmup.keys")), "digests"),
    "tensor added": Mutation(
        _head(lambda head: head.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})), "digests"
    ),
    "tensors overlap": Mutation(_head(lambda head: head.update(more=head["near.step"])), "invalid offset"),
    "bytes added": Mutation(_head(lambda head: None, b"more"), "not fully covered|InComplete|incomplete"),
    "truth value": Mutation(_neither_true_nor_false, r"bank\.alive: a truth value"),
    "header of another": Mutation(_header_of_another, "not those that were saved"),
    "no state": Mutation(lambda path: save_file({"a": torch.zeros(3)}, path), "no state"),
    "torch.save": Mutation(lambda path: torch.save({"a": torch.zeros(3)}, path)),
    "pickle": Mutation(_write(pickle.dumps(Evil()))),
    "pipe": Mutation(_pipe),
}  # fmt: skip


# Files of torch


def _member(name: str, data: bytes) -> Callable[[Path], None]:
    """Replace a member of the archive."""
    return lambda path: path.write_bytes(zipped({**unzipped(path.read_bytes()), name: data})) and None


def _bomb(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, b"0" * (24 << 20))

    return apply


def patched(program: bytes, old: bytes, new: bytes) -> bytes:
    """Return a pickle with one replacement."""
    assert old in program
    return program.replace(old, new, 1)


def _patch(old: bytes, new: bytes) -> Mutation:
    def apply(path: Path) -> None:
        members = unzipped(path.read_bytes())
        members["archive/data.pkl"] = patched(members["archive/data.pkl"], old, new)
        path.write_bytes(zipped(members))

    return Mutation(apply)


def claim(
    path: Path,
    shape: tuple[int, ...] = (4,),
    elements: int = 4,
    offset: int = 0,
    stride: tuple[int, ...] | None = None,
    kind: str = "FloatStorage",
    key: str = "0",
) -> None:
    """Write a state of one tensor of four elements whose pickle claims these sizes."""

    class Persistent(pickle.Pickler):
        def persistent_id(self, thing):
            return ("storage", getattr(torch, kind), key, "cpu", elements) if isinstance(thing, Storage) else None

    class Storage:
        pass

    class Tensor:
        def __reduce__(self):
            steps = stride if stride is not None else tuple(1 for _ in shape)
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, steps, False, OrderedDict())

    save_state(make(tensors={"a": torch.zeros(4)}), path)
    members = unzipped(path.read_bytes())
    text = next(a for _, a, _ in pickletools.genops(members["archive/data.pkl"]) if str(a).startswith('{"digest'))
    out = io.BytesIO()
    Persistent(out, 2).dump({"protokv": "{}", "tensors": {"a": Tensor()}})
    document = b"X" + struct.pack("<L", len(text)) + text.encode()
    program = patched(out.getvalue(), b"X\x02\x00\x00\x00{}", document)
    path.write_bytes(zipped({**members, "archive/data.pkl": program}))


PICKLES = {
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
    "deep": b"\x80\x02)" + b"\x85" * 20000 + b".",
    "itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "twice": b"\x80\x02}(X\x01\x00\x00\x00a)X\x01\x00\x00\x00a)u.",
    "persistent id of nothing": b"\x80\x02)Q.",
    "build": b"\x80\x02})b.",
    "not a state": pickle.dumps({"a": 1}, 2),
}

CLAIMS: list[dict[str, Any]] = [
    {"shape": (2**38,), "elements": 2**38},
    {"shape": (2**38,), "elements": 1, "stride": (0,)},
    {"offset": 2},
    {"offset": -4},
    {"shape": (-4,), "elements": -4},
    {"shape": (2**63, 2), "elements": 0},
    {"stride": (2**39,)},
    {"stride": (-1,)},
    {"shape": (1,) * 99, "elements": 1},
    {"key": "../0"},
    {"key": "1"},
    {"kind": "DoubleStorage"},
]

PT = {
    **{f"pickle: {name}": Mutation(_member("archive/data.pkl", one), "pickle|state") for name, one in PICKLES.items()},
    **{f"claim {str(fields)[:50]}": Mutation(partial(claim, **fields)) for fields in CLAIMS},
    **{f"bomb in {name}": Mutation(_bomb(name), "compressed") for name in ("archive/data.pkl", "archive/data/0")},
    "second pickle": Mutation(_member("x/data.pkl", b"\x80\x02}."), "one short pickle"),
    "storage without dtype": _patch(b"FloatStorage\n", b"UntypedStorage\n"),
    "storage of another dtype": _patch(b"torch\nFloatStorage", b"torch\nDoubleStorage"),
    "another function": _patch(b"_rebuild_tensor_v2", b"_rebuild_qtensor"),
    "no storage": _patch(b"X\x07\x00\x00\x00storage", b"X\x06\x00\x00\x00module"),
    "plain pickle": Mutation(_write(pickle.dumps(Evil(), 2))),
    "code through torch.save": Mutation(
        lambda path: torch.save({"protokv": "{}", "tensors": {"a": Evil()}}, path), "refers to"
    ),
    "old torch.save": Mutation(
        lambda path: torch.save({"a": 1}, path, _use_new_zipfile_serialization=False), "zip"
    ),
    "script": Mutation(
        _write(zipped({"archive/data.pkl": b"", "archive/code/__torch__.py": b"", "archive/byteorder": b"little"}))
    ),
}  # fmt: skip


# Zarr


def _digests(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    return change_document(lambda document: change(document["digests"]))


def _array(match: str, **fields: object) -> Mutation:
    """Change the metadata of an array, with the right digest."""

    def apply(path: Path) -> None:
        file = path / "bank" / "mass" / "zarr.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        _digests(lambda digests: digests.update({"bank/mass/zarr.json": bytes_digest(file.read_bytes())}))(path)

    return Mutation(apply, f"tensor bank.mass.*({match})")


def _grid(*chunk_shape: object) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": chunk_shape}}


def _root(**fields: object) -> Mutation:
    def apply(path: Path) -> None:
        group = json.loads((path / "zarr.json").read_text())
        (path / "zarr.json").write_text(json.dumps({**group, **fields}))

    return Mutation(apply, "zarr version 3")


def _in_place_of(place: str, target: str) -> Mutation:
    """Replace a file by another kind of entry."""

    def apply(path: Path) -> None:
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

    return Mutation(apply, error=StateError)


def _unsealed_metadata(path: Path) -> None:
    file = path / "bank" / "mass" / "zarr.json"
    file.write_text(file.read_text().replace("11", "10"))


def _two_cases(path: Path) -> None:
    shutil.copytree(path / "bank" / "mass", path / "BANK" / "mass")
    _digests(lambda all_: all_.update({f"BANK{key[4:]}": all_[key] for key in list(all_) if "mass" in key}))(path)


def _evil_name(path: Path) -> None:
    data = (path / "bank" / "mass" / "zarr.json").read_bytes()
    (path / EVIL).mkdir()
    (path / EVIL / "zarr.json").write_bytes(data)
    _digests(lambda digests: digests.update({f"{EVIL}/zarr.json": bytes_digest(data)}))(path)


NO_TENSOR = "not those of a tensor"
ROOTS = [b"", b"[" * 60000, b'{"a":' * 60000, b'{"attributes":{"protokv":{}},"a":NaN}', b"7", b'{"attributes":7}']
PLACES = ("zarr.json", "bank/mass/zarr.json", "bank/mass/c.0.0.0")
TARGETS = ("/dev/zero", "/etc/passwd", "/nowhere", "zarr.json", "pipe", "huge", "folder")

ZARR = {
    "shape of a terabyte": _array("missing", shape=[2, 3, 2**39]),
    "chunk of a terabyte": _array("bytes instead of", shape=[2, 3, 2**39], chunk_grid=_grid(2, 3, 2**39)),
    "shape beyond any machine": _array("missing", shape=[2**39, 2**39, 2**39]),
    "negative shape": _array(NO_TENSOR, shape=[2, 3, -11]),
    "shape of floats": _array(NO_TENSOR, shape=[2, 3, 11.0]),
    "too many axes": _array(NO_TENSOR, shape=[1] * 40),
    "fewer axes": _array("missing|bytes instead of", shape=[2, 3], chunk_grid=_grid(2, 3)),
    "shape as text": _array(NO_TENSOR, shape="2"),
    "empty chunks": _array("cut like this", chunk_grid=_grid(0, 3, 11)),
    "chunks of truth values": _array(NO_TENSOR, chunk_grid=_grid(True, 3, 11)),
    "endless chunks": _array(NO_TENSOR, chunk_grid=_grid(2, 3, 2**70)),
    "small chunks": _array("missing", chunk_grid=_grid(1, 1, 1)),
    "shorter chunks": _array("bytes instead of", chunk_grid=_grid(2, 3, 5)),
    "chunks of fewer axes": _array("cut like this", chunk_grid=_grid(2, 3)),
    "another grid": _array("another chunk_grid", chunk_grid={**_grid(2, 3, 11), "name": "rectangular"}),
    "no grid": _array(NO_TENSOR, chunk_grid=7),
    "wider dtype": _array("bytes instead of", data_type="float64"),
    **{f"dtype {one}": _array(NO_TENSOR, data_type=one) for one in ("object", "uint16", ["float32"])},
    "unknown codec": _array("another codecs", codecs=[{"name": "evil"}]),
    "compression": _array(
        "another codecs", codecs=[{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 9}}]
    ),
    "storage transformers": _array("another storage_transformers", storage_transformers=[{"name": "evil"}]),
    "separator": _array(
        "another|bytes instead",
        chunk_key_encoding={"name": "default", "configuration": {"separator": "/../"}},
    ),
    **{f"fill value {one}": _array("another fill_value", fill_value=one) for one in ("NaN", False)},
    "node type": _array("another node_type", node_type="both"),
    "zarr format": _array("another zarr_format", zarr_format=2),
    "must understand": _array("another must_understand", must_understand=1),
    "no attributes": _array(NO_TENSOR, attributes=7),
    "unsealed metadata": Mutation(_unsealed_metadata, r"tensor bank\.mass"),
    **{
        f"key {key}": Mutation(
            _digests(lambda digests, key=key: digests.update({key: digests["bank/mass/zarr.json"]})), "missing"
        )
        for key in ("../out/zarr.json", "/etc/x/zarr.json", "a/b/zarr.json", "/zarr.json")
    },
    "names of two cases": Mutation(_two_cases, r"(?i)tensor bank\.mass: not a name"),
    "evil name": Mutation(_evil_name, "missing"),
    **{f"root of another {key}": _root(**{key: "array"}) for key in ("node_type", "zarr_format", "attributes")},
    **{f"root {n}": Mutation(lambda path, r=root: (path / "zarr.json").write_bytes(r)) for n, root in enumerate(ROOTS)},
    **{f"{target} for {place}": _in_place_of(place, target) for place in PLACES for target in TARGETS},
}  # fmt: skip

MUTATIONS = {
    ".safetensors": {**DOCUMENT, **SAFETENSORS},
    ".pt": {**DOCUMENT, **PT},
    ".zarr": {**DOCUMENT, **ZARR},
}
