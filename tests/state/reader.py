"""A reader of states, written from docs/reference/format.md alone: json, struct, and nothing of protokv."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

LETTERS = {"F64": "d", "F32": "f", "F16": "e", "BF16": "H", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B"}
LETTERS["BOOL"] = "B"
WORDS = ("float64", "float32", "float16", "uint16", "int64", "int32", "int16", "int8", "uint8", "bool")
ZARR = dict(zip(WORDS, LETTERS, strict=True))


class Values(NamedTuple):
    """A tensor: its type, its shape, and its numbers in order."""

    type: str
    shape: list[int]
    numbers: list[Any]


class Contents(NamedTuple):
    """A state. `sealed` has each XXH3 digest with the bytes that it is over, `document` the SHA-256 with its bytes."""

    header: dict[str, Any]
    tensors: dict[str, Values]
    document: tuple[str, bytes]
    sealed: list[tuple[str, bytes]]


def read(path: str) -> Contents:
    """Read a .safetensors file or a .zarr folder."""
    return _read_folder(path) if path.endswith(".zarr") else _read_file(path)


def _open_document(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], tuple[str, bytes]]:
    digest = document.pop("digest")
    if set(document) != {"header", "digests"} or document["header"]["format_version"] != 1:
        raise ValueError("no document of version 1")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return document["header"], document["digests"], (digest, text.encode("ascii"))


def _numbers(kind: str, data: bytes) -> list[Any]:
    found = list(struct.unpack(f"<{len(data) // struct.calcsize('<' + LETTERS[kind])}{LETTERS[kind]}", data))
    if kind == "BF16":
        return [struct.unpack("<f", struct.pack("<I", number << 16))[0] for number in found]
    return [[False, True][number] for number in found] if kind == "BOOL" else found


def _read_file(path: str) -> Contents:
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(1 << 20, len(data) - 8):
        raise ValueError("the head is too long")
    head, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header, digests, document = _open_document(json.loads(head.pop("__metadata__")["protokv"]))
    if set(digests) != set(head):
        raise ValueError("a tensor without a digest, or a digest without a tensor")
    tensors, sealed = {}, []
    for name, entry in head.items():
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if end - begin != prod(shape) * struct.calcsize("<" + LETTERS[kind]):
            raise ValueError(f"{name} has another length")
        tensors[name] = Values(kind, shape, _numbers(kind, body[begin:end]))
        sealed.append((digests[name], f"{kind}{shape}\n".encode() + body[begin:end]))
    return Contents(header, tensors, document, sealed)


def _read_folder(path: str) -> Contents:
    attributes = json.loads(Path(path, "zarr.json").read_bytes())["attributes"]
    header, digests, document = _open_document(attributes["protokv"])
    tensors, sealed = {}, []
    for name, digest in digests.items():
        folder = Path(path, *name.split("."))
        entry = json.loads((folder / "zarr.json").read_bytes())
        kind, shape = ZARR[entry["data_type"]], entry["shape"]
        if entry["attributes"].get("torch_dtype") == "bfloat16":
            kind = "BF16"
        data = (folder / ".".join(["c", *["0"] * len(shape)])).read_bytes() if prod(shape) else b""
        tensors[name] = Values(kind, shape, _numbers(kind, data))
        sealed.append((digest, f"{kind}{shape}\n".encode() + data))
    return Contents(header, tensors, document, sealed)
