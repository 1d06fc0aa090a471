"""How a state lies in a zarr v3 hierarchy: keys and their bytes, wherever these are kept.

    zarr.json                     the group; its attribute "protokv" is the sealed document
    pieces/zarr.json              a group
    pieces/<digest>/zarr.json     an array of one chunk: a part of a tensor, cut along its longest axis
    pieces/<digest>/c.0.0         the chunk: its elements, little-endian, uncompressed

A piece is addressed by the SHA-256 of its place and its bytes, so what did not change has the address it had, and
nothing that a document names is ever written over. Any zarr library reads the pieces (bfloat16 as uint16); the document
says how they are joined. We read only the document and the chunks: what a chunk holds is told by the document and
confirmed by its digest, so no other metadata can say something else. The encoding is written out here, and not left to
the zarr library, which takes several times as long for a piece and leaves out chunks of zeros.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protokv.errors import StateError
from protokv.snapshot.digest import raw
from protokv.snapshot.document import DTYPES, corrupt, dtype_name, is_shape, parsed, sealed, unsealed
from protokv.snapshot.schema import Header, State, shown
from protokv.snapshot.side_by_side import in_order

ROOT = "zarr.json"
GROUP = "pieces/zarr.json"
GROUP_BYTES = b'{"zarr_format":3,"node_type":"group","attributes":{}}'
# Enough for 200 GB of tensors; what JSON becomes in memory may take twenty times its length.
DOCUMENT_LIMIT_BYTES = 4 << 20

# Small enough that a step changes few of them, large enough that a state of gigabytes has only hundreds.
PIECE_BYTES = 4 << 20

_KEY = "protokv"
_DIGEST = re.compile("[0-9a-f]{64}")
_ZARR_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "uint16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is cut into pieces.

    Attributes:
        dtype: name of its dtype.
        shape: its shape.
        axis: the axis it is cut along; 0 for a scalar, which is one piece.
        rows: what each piece has along that axis; the last one may have less.
    """

    dtype: str
    shape: tuple[int, ...]
    axis: int
    rows: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Cut:
        """Along the longest axis, which is that of the tokens in all that is large."""
        shape = tuple(tensor.shape)
        axis = max(range(len(shape)), key=lambda i: shape[i], default=0)
        length = shape[axis] if shape else 1
        rows = PIECE_BYTES * length // tensor.nbytes if tensor.nbytes else 1
        return cls(dtype_name(name, tensor.dtype), shape, axis, max(1, min(rows, length)))

    @property
    def pieces(self) -> int:
        """How many pieces there are; none of a tensor without elements."""
        if not math.prod(self.shape):
            return 0
        return math.ceil(self.shape[self.axis] / self.rows) if self.shape else 1

    def part(self, whole: Tensor, index: int) -> Tensor:
        """A view of what a piece holds."""
        if not self.shape:
            return whole
        return whole.narrow(self.axis, index * self.rows, self.piece_shape(index)[self.axis])

    def piece_shape(self, index: int) -> tuple[int, ...]:
        """Shape of a piece."""
        if not self.shape:
            return ()
        rows = min(self.rows, self.shape[self.axis] - index * self.rows)
        return (*self.shape[: self.axis], rows, *self.shape[self.axis + 1 :])

    def piece_bytes(self, index: int) -> int:
        """Bytes of the chunk of a piece."""
        return math.prod(self.piece_shape(index)) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece to be written: of which tensor, its digest, and its two values by key: metadata and chunk."""

    tensor: str
    digest: str
    values: dict[str, bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a document tells it: how it was cut, and the digests of its pieces in order."""

    cut: Cut
    digests: tuple[str, ...]

    def chunks(self) -> Iterator[tuple[str, str, int]]:
        """Digest, key and bytes of every chunk."""
        for index, digest in enumerate(self.digests):
            yield digest, _chunk_key(digest, self.cut), self.cut.piece_bytes(index)


def piece_of(key: str) -> str | None:
    """The digest of the piece that a key belongs to, None if it belongs to none."""
    parts = key.split("/")
    return parts[1] if len(parts) == 3 and parts[0] == "pieces" and _DIGEST.fullmatch(parts[1]) else None


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    """All pieces of tensors on any device, in order, a few of them at a time.

    Raises:
        StateError: A tensor has a dtype that a state cannot hold.
    """

    def made(name: str, tensor: Tensor, cut: Cut, index: int) -> Piece:
        data = raw(cut.part(tensor.detach(), index).cpu().contiguous())
        digest = _digest(name, index, cut, data)
        return Piece(
            name, digest, {f"pieces/{digest}/{ROOT}": _metadata(name, index, cut), _chunk_key(digest, cut): data.data}
        )

    whole = [(name, tensor, Cut.of(name, tensor)) for name, tensor in sorted(tensors.items())]
    return in_order(partial(made, name, t, cut, index) for name, t, cut in whole for index in range(cut.pieces))


def root_bytes(state: State, digests: Mapping[str, list[str]]) -> bytes:
    """The root document of a state whose pieces have these digests.

    Raises:
        StateError: It could not be read again, or is too long.
    """
    tensors = {}
    for name, tensor in state.tensors.items():
        cut = Cut.of(name, tensor)
        tensors[name] = {**asdict(cut), "shape": list(cut.shape), "pieces": digests.get(name, [])}
    document = sealed(state, tensors=tensors)
    root = f'{{"zarr_format":3,"node_type":"group","attributes":{{"{_KEY}":{document}}}}}'.encode()
    if len(root) > DOCUMENT_LIMIT_BYTES:
        raise StateError(f"the header of the state takes {len(root)} bytes, at most {DOCUMENT_LIMIT_BYTES} are allowed")
    return root


def read_root(data: bytes, path: str | os.PathLike[str]) -> tuple[Header, dict[str, Stored]]:
    """The header and the tensors that a root document tells of.

    Raises:
        StateCorrupt: It is no such document, or is not the one that was saved.
        StateMismatch: The format is newer than this version reads.
    """
    root = parsed(data, path)
    attributes = root.pop("attributes", None)
    if root != {"zarr_format": 3, "node_type": "group"} or not isinstance(attributes, dict):
        raise corrupt(path, "not a group of zarr version 3")
    if set(attributes) != {_KEY} or not isinstance(attributes[_KEY], dict):
        raise corrupt(path, f"a zarr group but no state: it lacks the attribute {_KEY}")
    header, document = unsealed(attributes[_KEY], {"tensors"}, path)
    if not isinstance(document["tensors"], dict):
        raise corrupt(path, "tensors: expected an object")
    tensors = {name: _read_tensor(name, value, path) for name, value in document["tensors"].items()}
    digests = [digest for tensor in tensors.values() for digest in tensor.digests]
    # Otherwise a small state could unfold to any size.
    if len(set(digests)) != len(digests):
        raise corrupt(path, "tensors: a piece is named twice")
    return header, tensors


def join(
    tensors: Mapping[str, Stored],
    read: Callable[[str, int], NDArray[np.uint8] | None],
    sizes: Mapping[str, int],
    path: str | os.PathLike[str],
    *,
    verify: bool,
    at_once: int | None = None,
) -> dict[str, Tensor]:
    """The tensors, whose pieces `read` gives by key and size, every one of them checked.

    Args:
        tensors: what the document tells.
        read: gives a value that has this many bytes, None if it has not; called side by side.
        sizes: bytes of all values that there are, so that nothing is allocated that is not there.
        path: where the state is, for messages.
        verify: check the digests.
        at_once: how many pieces to read side by side.

    Raises:
        StateCorrupt: A piece is missing or is not what was saved; the tensor is named.
    """
    for name, stored in tensors.items():
        for index, (_, key, size) in enumerate(stored.chunks()):
            if sizes.get(key) != size:
                found = f"has {sizes[key]} bytes instead of {size}" if key in sizes else "is missing"
                raise corrupt(path, f"tensor {shown(name)}: its piece {index} {found}")
    whole = {name: _empty(name, stored.cut, path) for name, stored in tensors.items()}

    def fetched(name: str, stored: Stored, index: int, key: str, size: int) -> None:
        cut, where = stored.cut, f"tensor {shown(name)}"
        data = read(key, size)
        if data is None or (verify and _digest(name, index, cut, data) != stored.digests[index]):
            raise corrupt(path, f"{where}: the bytes of its piece {index} are not those that were saved")
        if cut.dtype == "BOOL" and int(data.max()) > 1:
            raise corrupt(path, f"{where}: a truth value is neither 0 nor 1")
        part = torch.from_numpy(data).view(DTYPES[cut.dtype]).reshape(cut.piece_shape(index))
        cut.part(whole[name], index).copy_(part)

    calls = (
        partial(fetched, name, stored, index, key, size)
        for name, stored in tensors.items()
        for index, (_, key, size) in enumerate(stored.chunks())
    )
    for _ in in_order(calls, at_once):
        pass
    return whole


def _empty(name: str, cut: Cut, path: str | os.PathLike[str]) -> Tensor:
    try:
        return torch.empty(cut.shape, dtype=DTYPES[cut.dtype])
    except RuntimeError as error:
        raise corrupt(path, f"tensor {shown(name)}: impossible shape {list(cut.shape)}") from error


def _read_tensor(name: str, value: Any, path: str | os.PathLike[str]) -> Stored:
    where = f"tensor {shown(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "axis", "rows", "pieces"}:
        raise corrupt(path, f"{where}: expected dtype, shape, axis, rows and pieces")
    dtype, shape, axis, rows, digests = (value[key] for key in ("dtype", "shape", "axis", "rows", "pieces"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise corrupt(path, f"{where}: unknown dtype {shown(dtype)}")
    if not is_shape(shape):
        raise corrupt(path, f"{where}: its shape is not a list of sizes")
    if type(axis) is not int or not 0 <= axis < max(len(shape), 1) or type(rows) is not int or not 0 < rows < 2**40:
        raise corrupt(path, f"{where}: it is not cut along one of its axes")
    if not isinstance(digests, list) or not all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in digests):
        raise corrupt(path, f"{where}: its pieces are not digests")
    cut = Cut(dtype, tuple(shape), axis, rows)
    if len(digests) != cut.pieces:
        raise corrupt(path, f"{where}: {len(digests)} pieces do not make its shape")
    return Stored(cut, tuple(digests))


def _chunk_key(digest: str, cut: Cut) -> str:
    return f"pieces/{digest}/" + ".".join(["c", *["0"] * len(cut.shape)])


def _digest(name: str, index: int, cut: Cut, data: NDArray[np.uint8]) -> str:
    place = json.dumps([name, index, cut.dtype, list(cut.piece_shape(index))])
    digest = hashlib.sha256(f"{place}\n".encode())
    digest.update(data.data)
    return digest.hexdigest()


def _metadata(name: str, index: int, cut: Cut) -> bytes:
    shape = list(cut.piece_shape(index))
    width = DTYPES[cut.dtype].itemsize
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": _ZARR_TYPES[cut.dtype],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": False if cut.dtype == "BOOL" else 0,
        "codecs": [{"name": "bytes", **({"configuration": {"endian": "little"}} if width > 1 else {})}],
        "attributes": {
            _KEY: {
                "tensor": name,
                "dtype": str(DTYPES[cut.dtype]).removeprefix("torch."),
                "axis": cut.axis,
                "begin": index * cut.rows,
            }
        },
    }
    return json.dumps(document, separators=(",", ":")).encode()
