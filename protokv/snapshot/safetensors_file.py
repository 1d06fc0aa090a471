"""A state as one `.safetensors` file: readable by every safetensors library, verified by ours.

The header goes as JSON into `__metadata__` under "protokv", with a digest of every tensor and one of itself. The
file is written here rather than by the library, so that the same state gives the same bytes with every version
of it. Reading treats the file as untrusted: nothing is allocated before its size is known to be in the file, and
whatever is wrong ends in a StateError. No code is run, no pickle read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protokv.errors import StateError
from protokv.snapshot.atomic import DISK, FileSystem, commit, write_file
from protokv.snapshot.digest import raw, tensor_digests
from protokv.snapshot.document import (
    DTYPES,
    corrupt,
    dtype_name,
    is_shape,
    opened,
    parsed,
    sealed,
    unreadable,
    unsealed,
)
from protokv.snapshot.forms import check_file_target as check_target
from protokv.snapshot.forms import file_bytes as stored_bytes
from protokv.snapshot.schema import Header, State, shown

__all__ = ["check_target", "load", "read_header", "save", "stored_bytes"]

KEY = "protokv"

# A real header takes some 20 kB.
HEADER_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies: dtype name, shape, and bytes `[begin, end)` after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def save(state: State, path: str | os.PathLike[str], *, fs: FileSystem = DISK) -> None:
    """Write a state; `path` holds the old or the new one whole at any time.

    Raises:
        StateError: It cannot be written; the old one is still there.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    # Widest elements first, so that every tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    begin = 0
    described: dict[str, Any] = {}
    for name in order:
        tensor = tensors[name]
        dtype, shape, size = dtype_name(name, tensor.dtype), tuple(tensor.shape), tensor.nbytes
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    digests = tensor_digests((n, dtype_name(n, t.dtype), tuple(t.shape), raw(t)) for n, t in tensors.items())
    document = sealed(state, digests=digests)
    text = json.dumps({"__metadata__": {KEY: document}, **described}, separators=(",", ":"))
    head = text.encode()
    head += b" " * (-len(head) % 8)
    if len(head) > HEADER_LIMIT_BYTES:
        raise StateError(f"the header of the state takes {len(head)} bytes, at most {HEADER_LIMIT_BYTES} are allowed")

    def parts() -> Iterator[bytes | memoryview]:
        yield len(head).to_bytes(8, "little") + head
        for name in order:
            yield raw(tensors[name]).data

    commit(path, lambda temporary: write_file(temporary, parts(), fs), fs)


def load(path: str | os.PathLike[str], *, verify: bool = True) -> State:
    """Read a state, tensors on the CPU. Without `verify` the digests of the tensors are not checked.

    Raises:
        StateNotFound: Nothing is there.
        StateMismatch: The format is newer than this version reads.
        StateCorrupt: The file is damaged or hostile; the tensor or field is named where it can be.
    """
    with opened(path) as file:
        header, digests, entries, start = _read_head(file, path)
        found: dict[str, NDArray[np.uint8]] = {}

        def read() -> Iterator[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]:
            for name, entry in entries.items():
                what = f"tensor {shown(name)}"
                found[name] = _read(file, start + entry.begin, entry.end - entry.begin, path, what)
                yield name, entry.dtype, entry.shape, found[name]

        for name, digest in (tensor_digests(read()) if verify else dict.fromkeys(n for n, *_ in read())).items():
            if digest is not None and digest != digests[name]:
                raise corrupt(path, f"tensor {shown(name)}: its bytes are not those that were saved")
    tensors = {name: _tensor(data, entries[name], path, name) for name, data in found.items()}
    return State.of(header, tensors)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and verify the header alone. Raises as `load` does."""
    with opened(path) as file:
        return _read_head(file, path)[0]


def _read_head(
    file: BinaryIO, path: str | os.PathLike[str]
) -> tuple[Header, Mapping[str, str], Mapping[str, _Entry], int]:
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise corrupt(path, f"expected a state, the file has {size} bytes")
    length = int.from_bytes(_read(file, 0, 8, path, "header").tobytes(), "little")
    if length > min(HEADER_LIMIT_BYTES, size - 8):
        raise corrupt(path, f"header: a length of {length} bytes in a file of {size}")
    outer = parsed(_read(file, 8, length, path, "header").tobytes(), path)
    metadata = outer.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(KEY), str):
        raise corrupt(path, f"a safetensors file but no state: it lacks the field {KEY}")
    if set(metadata) != {KEY}:
        raise corrupt(path, "header: unknown metadata")
    document = parsed(metadata[KEY].encode("utf-8", "surrogatepass"), path)
    header, sealed_parts = unsealed(document, {"digests"}, path)
    entries = _entries(outer, size - 8 - length, path)
    digests = sealed_parts["digests"]
    if not isinstance(digests, dict) or set(digests) != set(entries):
        raise corrupt(path, "digests: expected one for every tensor and no other")
    return header, digests, entries, 8 + length


def _entries(outer: Mapping[str, Any], room: int, path: str | os.PathLike[str]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for name, value in outer.items():
        where = f"tensor {shown(name)}"
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise corrupt(path, f"{where}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise corrupt(path, f"{where}: unknown dtype {shown(dtype)}")
        if not is_shape(shape):
            raise corrupt(path, f"{where}: its shape is not a list of sizes")
        if not is_shape(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= room:
            raise corrupt(path, f"{where}: its bytes lie outside of the file")
        if math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
            raise corrupt(path, f"{where}: its shape does not fit its {offsets[1] - offsets[0]} bytes")
        entries[name] = _Entry(dtype, tuple(shape), *offsets)
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise corrupt(path, f"tensor {shown(name)}: there is a gap or an overlap before it")
        end = entry.end
    if end != room:
        raise corrupt(path, f"expected {end} bytes of tensors, the file has {room}")
    return entries


def _tensor(data: np.ndarray[Any, Any], entry: _Entry, path: str | os.PathLike[str], name: str) -> Tensor:
    if entry.dtype == "BOOL" and data.size and int(data.max()) > 1:
        raise corrupt(path, f"tensor {shown(name)}: a truth value is neither 0 nor 1")
    try:
        if not data.size:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.from_numpy(data).view(DTYPES[entry.dtype]).reshape(entry.shape)
    except RuntimeError as error:
        raise corrupt(path, f"tensor {shown(name)}: impossible shape {list(entry.shape)}") from error


def _read(
    file: BinaryIO, begin: int, size: int, path: str | os.PathLike[str], what: str
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = np.empty(size, np.uint8)
    try:
        file.seek(begin)
        found = file.readinto(data.data) if size else 0  # type: ignore[attr-defined]
    except OSError as error:
        raise unreadable(path, error) from error
    if found != size:
        raise corrupt(path, f"{what}: the file ends within it")
    return data
