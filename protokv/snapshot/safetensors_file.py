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
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound
from protokv.snapshot.atomic import DISK, FileSystem, commit, write_file
from protokv.snapshot.digest import canonical, document_digest, raw, tensor_digest
from protokv.snapshot.schema import Header, State, shown

KEY = "protokv"

# A real header takes some 20 kB.
HEADER_LIMIT_BYTES = 1 << 20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_NOT_A_STATE = "the file is damaged, or is not a state of protokv"


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
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise StateError(f"tensor {name}: a state cannot hold {tensor.dtype}")
    # Widest elements first, so that every tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    begin = 0
    described: dict[str, Any] = {}
    digests: dict[str, str] = {}
    for name in order:
        tensor = tensors[name]
        dtype, shape, size = NAMES[tensor.dtype], tuple(tensor.shape), tensor.numel() * tensor.element_size()
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
        digests[name] = tensor_digest(dtype, shape, raw(tensor))
        begin += size
    try:
        document: dict[str, Any] = {"header": state.to_json(), "digests": digests}
        # What could not be read again must not be written.
        Header.from_json(json.loads(canonical(document["header"])))
        document["digest"] = document_digest(document)
        text = json.dumps({"__metadata__": {KEY: canonical(document)}, **described}, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StateError(f"the header of the state is not plain JSON: {error}") from error
    except (StateCorrupt, StateMismatch) as error:
        raise StateError(f"the header of the state cannot be written: {error.message}") from error
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
    with _opened(path) as file:
        header, digests, entries, start = _read_head(file, path)
        tensors: dict[str, Tensor] = {}
        for name, entry in entries.items():
            data = _read(file, start + entry.begin, entry.end - entry.begin, path, f"tensor {shown(name)}")
            if verify and tensor_digest(entry.dtype, entry.shape, data) != digests[name]:
                raise _corrupt(path, f"tensor {shown(name)}: its bytes are not those that were saved")
            tensors[name] = _tensor(data, entry, path, name)
    return State.of(header, tensors)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and verify the header alone. Raises as `load` does."""
    with _opened(path) as file:
        return _read_head(file, path)[0]


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise StateCorrupt(f"expected a state file, {os.fspath(path)} is {kind}")
        return Path(path).open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise StateNotFound(
            f"no state at {os.fspath(path)}", hint="check the spelling; `protokv ingest VIDEO -o STATE` makes one"
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise StateError(f"cannot read the state {os.fspath(path)}: {why}") from error


def _read_head(
    file: BinaryIO, path: str | os.PathLike[str]
) -> tuple[Header, Mapping[str, str], Mapping[str, _Entry], int]:
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise _corrupt(path, f"expected a state, the file has {size} bytes")
    length = int.from_bytes(_read(file, 0, 8, path, "header").tobytes(), "little")
    if length > min(HEADER_LIMIT_BYTES, size - 8):
        raise _corrupt(path, f"header: a length of {length} bytes in a file of {size}")
    outer = _json(_read(file, 8, length, path, "header").tobytes(), path)
    metadata = outer.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(KEY), str):
        raise StateCorrupt(
            f"{os.fspath(path)} is a safetensors file but no state: it lacks the field {KEY}", hint=_NOT_A_STATE
        )
    if set(metadata) != {KEY}:
        raise _corrupt(path, "header: unknown metadata")
    document = _json(metadata[KEY].encode("utf-8", "surrogatepass"), path)
    digest = document.pop("digest", None)
    try:
        intact = digest == document_digest(document)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise _corrupt(path, "header: it is not the one that was saved")
    try:
        header = Header.from_json(document.get("header"))
    except (StateCorrupt, StateMismatch) as error:
        raise type(error)(f"{os.fspath(path)}: {error.message}", hint=error.hint or _NOT_A_STATE) from None
    entries = _entries(outer, size - 8 - length, path)
    digests = document.get("digests")
    if not isinstance(digests, dict) or set(digests) != set(entries) or set(document) != {"header", "digests"}:
        raise _corrupt(path, "digests: expected one for every tensor and no other")
    return header, digests, entries, 8 + length


def _entries(outer: Mapping[str, Any], room: int, path: str | os.PathLike[str]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for name, value in outer.items():
        where = f"tensor {shown(name)}"
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise _corrupt(path, f"{where}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise _corrupt(path, f"{where}: unknown dtype {shown(dtype)}")
        if not _is_counts(shape) or len(shape) > 16:
            raise _corrupt(path, f"{where}: its shape is not a list of sizes")
        if not _is_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= room:
            raise _corrupt(path, f"{where}: its bytes lie outside of the file")
        if math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
            raise _corrupt(path, f"{where}: its shape does not fit its {offsets[1] - offsets[0]} bytes")
        entries[name] = _Entry(dtype, tuple(shape), *offsets)
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise _corrupt(path, f"tensor {shown(name)}: there is a gap or an overlap before it")
        end = entry.end
    if end != room:
        raise _corrupt(path, f"expected {end} bytes of tensors, the file has {room}")
    return entries


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**40 for one in value)


def _tensor(data: np.ndarray[Any, Any], entry: _Entry, path: str | os.PathLike[str], name: str) -> Tensor:
    if entry.dtype == "BOOL" and data.size and int(data.max()) > 1:
        raise _corrupt(path, f"tensor {shown(name)}: a truth value is neither 0 nor 1")
    try:
        if not data.size:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.from_numpy(data).view(DTYPES[entry.dtype]).reshape(entry.shape)
    except RuntimeError as error:
        raise _corrupt(path, f"tensor {shown(name)}: impossible shape {list(entry.shape)}") from error


def _read(
    file: BinaryIO, begin: int, size: int, path: str | os.PathLike[str], what: str
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = np.empty(size, np.uint8)
    try:
        file.seek(begin)
        found = file.readinto(data.data) if size else 0  # type: ignore[attr-defined]
    except OSError as error:
        raise StateError(f"cannot read the state {os.fspath(path)}: {error.strerror}") from error
    if found != size:
        raise _corrupt(path, f"{what}: the file ends within it")
    return data


def _json(data: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name is given twice")
        return made

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not a number")

    try:
        found = json.loads(data.decode(), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"header: not the JSON that was saved ({shown(error)})") from error
    if not isinstance(found, dict):
        raise _corrupt(path, "header: expected an object")
    return found


def _corrupt(path: str | os.PathLike[str], what: str) -> StateCorrupt:
    return StateCorrupt(f"{os.fspath(path)}: {what}", hint=_NOT_A_STATE)
