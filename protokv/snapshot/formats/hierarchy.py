"""How a state lies in a Zarr v3 hierarchy, wherever the hierarchy is kept: its groups, arrays, chunks and document.

    zarr.json                   the root group; its attribute "protokv" is the sealed document
    bank/zarr.json              a group for each first part of the tensors' names
    bank/key_center/zarr.json   an array for each tensor: shape, dtype, dimension names, units and meaning
    bank/key_center/c.0.0.1.0   a chunk: a few MiB, cut along the longest axis, little-endian, uncompressed

bfloat16 is kept as uint16, and the attribute `torch_dtype` says so. The document holds the header of the state and, for
every tensor, its dtype, shape, rows in a chunk and the digest of every chunk. All is encoded and decoded by the zarr
library; a reader first compares what it found with the metadata that the sealed document leads to, so the library never
sees metadata that somebody else wrote. Specification: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor
from zarr.abc.store import Store
from zarr.codecs import BytesCodec
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from protokv.errors import StateError
from protokv.snapshot.digest import bytes_digest
from protokv.snapshot.document import DTYPES, check_names, corrupt, dtype_name, is_shape, parse_json, seal, unseal
from protokv.snapshot.formats.base import StatePath
from protokv.snapshot.schema import Header, Legend, State
from protokv.snapshot.text import shown

KEY = "protokv"

# The metadata of a group or an array, in its place.
ROOT = "zarr.json"

# Small enough that a step changes few of them, large enough that a state of gigabytes has only hundreds.
CHUNK_BYTES = 4 << 20

# Metadata of an array take one kilobyte.
METADATA_LIMIT_BYTES = 1 << 16

# Enough for 200 GB of tensors; what JSON becomes in memory may take twenty times its length.
DOCUMENT_LIMIT_BYTES = 4 << 20

_PARTS = {"arrays"}


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is cut into chunks.

    Attributes:
        dtype: the name of its dtype.
        shape: its shape.
        rows: what a chunk has along the longest axis, which is that of the tokens in all that is large; the last chunk
            is filled up with zeros.
    """

    dtype: str
    shape: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Layout:
        """The layout of a tensor; its chunks stay what they are while it grows along that axis."""
        shape = tuple(tensor.shape)
        longest = max(shape, default=1)
        rows = CHUNK_BYTES * longest // tensor.nbytes if tensor.nbytes else 1
        return cls(dtype_name(name, tensor.dtype), shape, max(1, min(rows, longest)))

    @property
    def axis(self) -> int:
        """The longest axis, the first of several; 0 for a scalar."""
        return max(range(len(self.shape)), key=lambda i: self.shape[i], default=0)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of every chunk."""
        axis = self.axis
        return tuple(self.rows if i == axis else max(1, size) for i, size in enumerate(self.shape))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of every chunk."""
        return math.prod(self.chunk_shape) * DTYPES[self.dtype].itemsize

    @property
    def chunks(self) -> int:
        """How many there are; none of a tensor without elements, one of a scalar."""
        if not self.shape:
            return 1
        return math.ceil(self.shape[self.axis] / self.rows) if math.prod(self.shape) else 0

    def chunk_keys(self, name: str, separator: str = ".") -> Iterator[str]:
        """Where the chunks are, from the root, in order."""
        for index in range(self.chunks):
            place = [str(index if i == self.axis else 0) for i in range(len(self.shape))]
            yield f"{path_of(name)}/{separator.join(['c', *place])}"

    def slab(self, index: int) -> tuple[slice, ...]:
        """What of the tensor a chunk holds."""
        whole = [slice(None)] * len(self.shape)
        if self.shape:
            whole[self.axis] = slice(index * self.rows, (index + 1) * self.rows)
        return tuple(whole)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a document tells it: its layout, and the digests of its chunks in order."""

    layout: Layout
    digests: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What the document holds."""
        layout = self.layout
        return {
            "dtype": layout.dtype,
            "shape": list(layout.shape),
            "rows": layout.rows,
            "digests": list(self.digests),
        }


def path_of(name: str) -> str:
    """Where the array of a tensor is, from the root."""
    return name.replace(".", "/")


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The values of a tensor on any device as the array holds them: bfloat16 as uint16. Shares memory where it can."""
    values = tensor.detach().cpu()
    return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()


def as_tensor(array: NDArray[Any], dtype: str) -> Tensor:
    """The inverse of `as_array`."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "BF16" else tensor


def create_array(
    store: Store, name: str, layout: Layout, separator: str = ".", legend: Legend | None = None
) -> zarr.Array[Any]:
    """The array of a tensor, with its groups, without its chunks; what is there already is left.

    Its axes are named after itself where there is no legend, or one of another tensor.
    """
    dimensions = [f"{name.rpartition('.')[2]}_{axis}" for axis in range(len(layout.shape))]
    attributes: dict[str, Any] = {"torch_dtype": "bfloat16"} if layout.dtype == "BF16" else {}
    if legend is not None and len(legend.dims) == len(layout.shape):
        dimensions = list(legend.dims)
        told = {"long_name": legend.meaning, "units": legend.unit}
        attributes |= {key: value for key, value in told.items() if value}
    return zarr.create_array(
        store,
        name=path_of(name),
        shape=layout.shape,
        chunks=layout.chunk_shape,
        dtype="uint16" if layout.dtype == "BF16" else str(DTYPES[layout.dtype]).removeprefix("torch."),
        fill_value=0,
        serializer=BytesCodec(),
        compressors=None,
        filters=None,
        chunk_key_encoding={"name": "default", "separator": separator},
        dimension_names=dimensions,
        attributes=attributes,
        # A chunk of zeros is a chunk: one that is missing is damage.
        config={"write_empty_chunks": True},
    )


def document_of(state: State, digests: Mapping[str, list[str]]) -> dict[str, Any]:
    """The attributes of the root: the sealed document of a state whose chunks have these digests.

    Raises:
        StateError: It could not be read again, or is too long.
    """
    arrays = {
        name: Stored(Layout.of(name, tensor), tuple(digests.get(name, ()))).to_json()
        for name, tensor in state.tensors.items()
    }
    text = seal(state, arrays=arrays)
    # The library indents it, one line a digest.
    if 2 * len(text) > DOCUMENT_LIMIT_BYTES:
        raise StateError(
            f"the header of the state takes {len(text)} bytes, at most {DOCUMENT_LIMIT_BYTES // 2} are allowed"
        )
    return {KEY: json.loads(text)}


def read_document(root: Mapping[str, Any], path: StatePath) -> tuple[Header, dict[str, Stored]]:
    """The header and the tensors that the metadata of a root group tells of.

    Raises:
        StateCorrupt: It is no such document, or is not the one that was saved.
        StateMismatch: The format is newer than this version reads.
    """
    attributes = root.get("attributes")
    if root.get("zarr_format") != 3 or root.get("node_type") != "group" or not isinstance(attributes, dict):
        raise corrupt(path, "not a group of zarr version 3")
    if not isinstance(attributes.get(KEY), dict):
        raise corrupt(path, f"a zarr group but no state: it lacks the attribute {KEY}")
    header, document = unseal(dict(attributes[KEY]), _PARTS, path)
    arrays = document["arrays"]
    if not isinstance(arrays, dict):
        raise corrupt(path, "arrays: expected an object")
    check_names(set(arrays), arrays, path)
    return header, {name: _stored(name, value, path) for name, value in arrays.items()}


def check_metadata(found: Mapping[str, Any], expected: Mapping[str, Any], name: str, path: StatePath) -> None:
    """Whether the metadata of an array is what its layout leads to, in all that tells how bytes become values.

    Raises:
        StateCorrupt: naming the tensor and the field.
    """
    free = {"attributes", "dimension_names"}
    for key in sorted({*found, *expected} - free):
        if found.get(key) != expected.get(key) or type(found.get(key)) is not type(expected.get(key)):
            raise corrupt(path, f"tensor {shown(name)}: its metadata say another {shown(key)} than the sealed document")


def encode_state(state: State, separator: str = ".") -> Iterator[tuple[str, memoryview, str | None]]:
    """Key and bytes of all that a hierarchy consists of, as the library makes them, and the digests of chunks.

    Metadata of an array and of its groups come before its chunks, and the root's last. Those of a group come once for
    each of its arrays. Raises as `document_of`.
    """
    digests: dict[str, list[str]] = {}
    for name, tensor in sorted(state.tensors.items()):
        layout, made = Layout.of(name, tensor), dict[str, Any]()
        array = create_array(MemoryStore(made), name, layout, separator, state.legends.get(name))
        for key in sorted(made.keys() - {ROOT}):
            yield key, made[key].as_buffer_like(), None
        made.clear()
        values, digests[name] = as_array(tensor), []
        for index, key in enumerate(layout.chunk_keys(name, separator)):
            array[layout.slab(index) or ...] = values[layout.slab(index)]
            data = memoryview(made.pop(key).as_numpy_array()).cast("B")
            digests[name].append(bytes_digest(data))
            yield key, data, digests[name][-1]
    root: dict[str, Any] = {}
    zarr.create_group(MemoryStore(root), attributes=document_of(state, digests))
    yield ROOT, root[ROOT].as_buffer_like(), None


def decode(
    name: str,
    stored: Stored,
    metadata: bytes | None,
    chunks: Iterable[NDArray[np.uint8] | None],
    path: StatePath,
    *,
    verify: bool,
    separator: str = ".",
) -> Tensor:
    """A tensor, decoded by the library from metadata that we made.

    Args:
        name: its name.
        stored: what the document tells of it.
        metadata: what was found as the metadata of its array; None if nothing was.
        chunks: the bytes of its chunks in order, `[chunk_bytes]` uint8 and writable; None for one that is not there.
            There must be such chunks before this is called: room is made for all of them.
        path: where the state is, for messages.
        verify: compare the chunks with their digests.
        separator: of the chunks' keys.

    Raises:
        StateCorrupt: naming the tensor.
    """
    layout, where = stored.layout, f"tensor {shown(name)}"
    if metadata is None:
        raise corrupt(path, f"{where}: its metadata are missing")
    made: dict[str, Any] = {}
    array = create_array(MemoryStore(made), name, layout, separator)
    expected = made[f"{path_of(name)}/{ROOT}"].to_bytes()
    check_metadata(parse_json(metadata, path), parse_json(expected, path), name, path)
    try:
        if not layout.chunks:
            return torch.empty(layout.shape, dtype=DTYPES[layout.dtype])
        values = np.empty(layout.shape, array.dtype)
    except (ValueError, MemoryError, RuntimeError) as error:
        raise corrupt(path, f"{where}: impossible shape {list(layout.shape)}") from error
    keys = layout.chunk_keys(name, separator)
    for index, (key, digest, data) in enumerate(zip(keys, stored.digests, chunks, strict=True)):
        if data is None or len(data) != layout.chunk_bytes:
            raise corrupt(path, f"{where}: its chunk {shown(key)} is missing")
        if verify and bytes_digest(data.data) != digest:
            raise corrupt(path, f"{where}: its bytes are not those that were saved")
        if layout.dtype == "BOOL" and int(data.max()) > 1:
            raise corrupt(path, f"{where}: a truth value is neither 0 nor 1")
        made[key] = cpu.Buffer.from_array_like(data)
        # Into its place at once: a chunk in between would be copied twice.
        slab = layout.slab(index) or ...
        array.get_basic_selection(slab, out=cpu.NDBuffer.from_numpy_array(values[slab]))
        del made[key]
    return as_tensor(values, layout.dtype)


def _stored(name: str, value: Any, path: StatePath) -> Stored:
    where = f"tensor {shown(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "rows", "digests"}:
        raise corrupt(path, f"{where}: expected dtype, shape, rows and digests")
    dtype, shape, rows, digests = (value[key] for key in ("dtype", "shape", "rows", "digests"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise corrupt(path, f"{where}: unknown dtype {shown(dtype)}")
    if not is_shape(shape):
        raise corrupt(path, f"{where}: its shape is not a list of sizes")
    if type(rows) is not int or not 0 < rows <= max([1, *shape]):
        raise corrupt(path, f"{where}: it is not cut along its longest axis")
    if not isinstance(digests, list) or not all(isinstance(one, str) and len(one) == 32 for one in digests):
        raise corrupt(path, f"{where}: its chunks have no digests")
    layout = Layout(dtype, tuple(shape), rows)
    if len(digests) != layout.chunks:
        raise corrupt(path, f"{where}: {len(digests)} chunks do not make its shape")
    return Stored(layout, tuple(digests))
