"""A state as a Zarr v3 hierarchy that every zarr library opens: a `.zarr` folder, or inside another store.

    zarr.json                   the root group; its attribute "protokv" is the sealed document
    bank/zarr.json              a group for each first part of the tensors' names
    bank/key_center/zarr.json   an array for each tensor: shape, dtype, dimension names, units and meaning
    bank/key_center/c.0.0.1.0   a chunk: a few MiB, split along the longest axis, little-endian, uncompressed

bfloat16 is stored as uint16, and the attribute `torch_dtype` says so. The document holds the header and the digest of
everything else by its key. A commit writes a complete folder and swaps it with the old one. A reader trusts nothing:
folders and files only, no links, array metadata exactly as this module writes them for the shape, and chunks of exactly
the size that the shape gives, so nothing decompresses or grows.
Specification: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
import zarr
from msgspec import Meta
from torch import Tensor
from zarr.abc.store import ByteRequest, Store
from zarr.api import asynchronous
from zarr.codecs import BytesCodec
from zarr.core import sync as in_thread
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from protokv.errors import StateCorrupt, shown
from protokv.state.commit import replace, sync_folder, write_file, writing
from protokv.state.digest import DTYPES, bytes_digest, check_dtypes
from protokv.state.files import LocalForm
from protokv.state.form import Stored
from protokv.state.snapshot import (
    KEY,
    Found,
    State,
    check_tensor_names,
    not_found,
    not_ours,
    parse_state_json,
    seal,
    unseal,
)

# The metadata file of a group or an array.
ROOT = "zarr.json"

# Small enough that a step changes few chunks, large enough that a state of gigabytes has only hundreds.
CHUNK_BYTES = 4 << 20

# Enough for 200 GB of tensors; parsed JSON may take twenty times its length in memory.
DOCUMENT_LIMIT_BYTES = 4 << 20
_METADATA_LIMIT_BYTES = 1 << 16

# Far more files than a state has.
_MOST_FILES = 1 << 18

# Threads that write and sync files.
_WRITERS = 4

# Digest smaller data without a thread.
_SMALL_BYTES = 1 << 16

_Sizes = Sequence[int]
_Result = TypeVar("_Result")
_NOTHING: Mapping[str, str] = {}
_BUFFERS = default_buffer_prototype()
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if dtype != torch.bfloat16}
_Shape = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**40)], ...], Meta(max_length=16)]


class ZarrForm(LocalForm):
    """One `.zarr` folder."""

    suffix = ".zarr"
    kind = "folder"

    def check_target(self) -> None:
        """Raise StateError unless nothing is there, or a state, damaged or not."""
        super().check_target()
        with writing(self.path):
            foreign = _find_foreign(self.target)
        if foreign:
            raise not_ours(self.path, f", or holds more ({shown(foreign)})")

    def replace(self, state: State) -> None:
        """Put the folder in place."""
        self.check_target()
        with writing(self.path):
            replace(self.target, lambda folder: _write_folder(state, folder))

    def open(self, target: Path) -> Stored:
        """Open the folder after a look at all of its files."""
        if not any(target.iterdir()):
            # A user may make the folder first.
            raise not_found(self.path)
        sizes = _file_sizes(target)
        return Hierarchy(LocalStore(target, read_only=True), lambda keys: {key: sizes.get(key, 0) for key in keys})


def sync(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what a coroutine returns in zarr's thread."""
    try:
        loop = in_thread._get_loop()
    except BaseException:
        # A thread that could not begin: zarr would wait for it from now on.
        if in_thread.loop[0] is not None:
            in_thread.loop[0].close()
            in_thread.loop[0] = None
        coroutine.close()
        raise
    return in_thread.sync(coroutine, loop)


class _NewFolder(LocalStore):
    """A new folder for the zarr library to write into; a few threads write and sync every file once."""

    def __init__(self, root: Path, pool: ThreadPoolExecutor) -> None:
        super().__init__(root)
        self._pool, self.folders = pool, [root]
        root.mkdir()

    async def set(self, key: str, value: Buffer) -> None:
        """Write a file, unless it is the metadata of a group that is there already."""
        file = self.root / key
        for folder in reversed(file.relative_to(self.root).parents):
            if self.root / folder not in self.folders:
                (self.root / folder).mkdir()
                self.folders.append(self.root / folder)
        if not file.exists():
            data = as_bytes(value)
            await asyncio.wrap_future(self._pool.submit(write_file, file, lambda out: out.write(data)))


def _write_folder(state: State, root: Path) -> None:
    """Write and sync a new hierarchy. All threads have ended when this returns or raises."""
    with ThreadPoolExecutor(_WRITERS) as pool:
        store = _NewFolder(root, pool)
        write_state(state, store)
    for folder in reversed(store.folders):
        sync_folder(folder)


def _fail(error: OSError) -> None:
    # A folder that cannot be listed is not an empty one.
    raise error


def _file_sizes(root: Path) -> dict[str, int]:
    """Return the bytes of every file by its path from the root. Links and other special files are refused."""
    sizes: dict[str, int] = {}
    walk = os.walk(root, onerror=_fail)
    for n, path in enumerate(Path(where, name) for where, folders, files in walk for name in (*folders, *files)):
        key, status = path.relative_to(root).as_posix(), path.lstat()
        if stat.S_ISREG(status.st_mode):
            sizes[key] = status.st_size
        elif not stat.S_ISDIR(status.st_mode):
            raise StateCorrupt(f"{shown(key)} is neither a file nor a folder")
        if n > _MOST_FILES:
            raise StateCorrupt(f"more than {_MOST_FILES} files")
    return sizes


def _find_foreign(target: Path) -> str:
    """Return a file there that belongs to no state of ours; empty if the folder may be replaced."""
    if not target.is_dir() or not any(target.iterdir()):
        return ""
    root = target / ROOT
    ours = root.is_file() and not root.is_symlink() and root.stat().st_size <= DOCUMENT_LIMIT_BYTES
    if not ours or f'"{KEY}"'.encode() not in root.read_bytes():
        return ROOT
    # os.walk does not enter a link to a folder; the link goes with the state.
    for folder, _, files in os.walk(target, onerror=_fail):
        for name in files:
            if name != ROOT and not re.fullmatch(r"c(\.\d+)*", name):
                return str(Path(folder, name).relative_to(target))
    return ""


def write_state(
    state: State, store: Store, separator: str = ".", there: Mapping[str, str] = _NOTHING
) -> dict[str, str]:
    """Write a state into a store; the root's metadata, with the document, come last.

    Args:
        state: to be written.
        store: of the zarr library.
        separator: between the numbers in the keys of chunks.
        there: digests of the contents of the store, by key; equal contents are not written again.

    Returns:
        The digests of everything but the root's metadata, by key.

    Raises:
        StateError: the state could not be read again; nothing was written.
    """
    check_dtypes(state.tensors)
    seal(state, DOCUMENT_LIMIT_BYTES // 2, {})
    return sync(_write_hierarchy(state, _DigestingStore(store, there), separator))


async def _write_hierarchy(state: State, store: _DigestingStore, separator: str) -> dict[str, str]:
    for name, tensor in sorted(state.tensors.items()):
        values = tensor.detach().cpu()
        attributes: dict[str, Any] = {"torch_dtype": "bfloat16"} if tensor.dtype == torch.bfloat16 else {}
        # Axes are named after the tensor if nothing describes it, or something with other axes.
        dims: Sequence[str] = [f"{name.rpartition('.')[2]}_{axis}" for axis in range(tensor.dim())]
        info = state.tensor_info.get(name)
        if info is not None and len(info.dims) == tensor.dim():
            told = {"long_name": info.meaning, "units": info.unit}
            attributes |= {key: value for key, value in told.items() if value}
            dims = info.dims
        array = (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
        named = {"dimension_names": dims, "attributes": attributes}
        made = await _create(store, name, array.shape, _chunk_shape(tensor), array.dtype, separator, **named)
        if array.size:
            await made.setitem(..., array)
    text = seal(state, DOCUMENT_LIMIT_BYTES // 2, store.digests)
    root: dict[str, Buffer] = {}
    await asynchronous.create_group(store=MemoryStore(root), attributes={KEY: json.loads(text)})
    digests = dict(store.digests)
    await store.set(ROOT, root[ROOT])
    return digests


class Hierarchy(Stored):
    """A state in a store of the zarr library. StateCorrupt if the root group is not that of a state."""

    def __init__(self, store: Store, sizes: Callable[[Collection[str]], Mapping[str, int]]) -> None:
        """Read the document. `sizes` returns the bytes of each key, 0 for a missing key."""
        found = sync(store.get(ROOT, _BUFFERS)) if 0 < sizes([ROOT])[ROOT] <= DOCUMENT_LIMIT_BYTES else None
        if found is None:
            raise StateCorrupt(f"there is no {ROOT} that could be that of a state")
        group = parse_state_json(found.to_bytes())
        attributes = group.get("attributes")
        if group.get("zarr_format") != 3 or group.get("node_type") != "group" or not isinstance(attributes, dict):
            raise StateCorrupt("not a group of zarr version 3")
        if not isinstance(document := attributes.get(KEY), dict):
            raise StateCorrupt(f"a zarr group but no state: it lacks the attribute {KEY}")
        self.header, self.digests = unseal(document)
        self._store, self._sizes = store, sizes

    @cached_property
    def found(self) -> Found:
        """Shape and dtype of the arrays, after a check of their metadata and of the sizes of their chunks."""
        found = sync(_find_arrays(_VerifyingStore(self._store, self.digests, verify=False), self._sizes(self.digests)))
        check_tensor_names(found)
        return found

    def tensors(self, verify: bool, names: Collection[str] | None = None) -> Mapping[str, Tensor]:
        """Read the arrays."""
        wanted = self.found if names is None else {name: self.found[name] for name in names}
        return sync(_read(_VerifyingStore(self._store, self.digests, verify), wanted))

    def nbytes(self) -> int:
        """Return the bytes of the root and of everything that it names."""
        return sum(self._sizes([ROOT, *self.digests]).values())


async def _find_arrays(store: _VerifyingStore, sizes: Mapping[str, int]) -> Found:
    found = {}
    for key in store.digests:
        if key.endswith(f"/{ROOT}"):
            small = 0 < sizes[key] <= _METADATA_LIMIT_BYTES
            if (data := await store.get(key, _BUFFERS) if small else None) is None:
                raise StateCorrupt(f"{shown(key)}: such metadata are missing")
            metadata = parse_state_json(data.to_bytes())
            if metadata.get("node_type") != "group":
                name = key.removesuffix(f"/{ROOT}").replace("/", ".")
                found[name] = await _check_array(name, metadata, sizes)
    return found


async def _read(store: _VerifyingStore, found: Found) -> dict[str, Tensor]:
    tensors = {}
    for name, (shape, dtype) in found.items():
        array = await asynchronous.open_array(store=store, path=name.replace(".", "/"), mode="r")
        values = np.asarray(await array.getitem(...))
        tensor = torch.from_numpy(values) if values.size else torch.empty(shape, dtype=dtype)
        tensors[name] = tensor.view(dtype) if dtype == torch.bfloat16 else tensor
    return tensors


def _chunk_shape(tensor: Tensor) -> list[int]:
    """Split the longest axis, which is the tokens' in every large tensor; chunks stay the same when it grows."""
    shape = [max(1, size) for size in tensor.shape]
    if shape:
        longest = max(shape)
        rows = CHUNK_BYTES * longest // max(1, tensor.nbytes)
        shape[shape.index(longest)] = max(1, min(rows, longest))
    return shape


async def _create(
    store: Store, name: str, shape: _Sizes, chunks: _Sizes, dtype: Any, separator: str, **told: Any
) -> zarr.AsyncArray[Any]:
    return await asynchronous.create_array(
        store,
        name=name.replace(".", "/"),
        shape=tuple(shape),
        chunks=tuple(chunks),
        dtype=dtype,
        fill_value=0,
        serializer=BytesCodec(),
        compressors=None,
        filters=None,
        chunk_key_encoding={"name": "default", "separator": separator},
        # Write chunks of zeros too: a missing chunk is damage.
        config={"write_empty_chunks": True},
        **told,
    )


async def _check_array(name: str, metadata: dict[str, Any], sizes: Mapping[str, int]) -> tuple[_Shape, torch.dtype]:
    """Return shape and dtype of an array if its metadata are as we write them and its chunks have the right sizes."""
    where = f"tensor {shown(name)}"
    try:
        shape = msgspec.convert(metadata.get("shape"), _Shape)
        chunks = msgspec.convert(metadata["chunk_grid"]["configuration"]["chunk_shape"], _Shape)
        stored_dtype, torch_dtype = metadata["data_type"], metadata["attributes"].get("torch_dtype")
        dtype = torch.bfloat16 if (stored_dtype, torch_dtype) == ("uint16", "bfloat16") else _DTYPES[stored_dtype]
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
        raise StateCorrupt(f"{where}: its metadata are not those of a tensor ({shown(error)})") from None
    if len(chunks) != len(shape) or 0 in chunks:
        raise StateCorrupt(f"{where}: no tensor is cut like this")
    separator = "/" if "/" in json.dumps(metadata.get("chunk_key_encoding")) else "."
    made: dict[str, Buffer] = {}
    array = await _create(MemoryStore(made), name, shape, chunks, stored_dtype, separator)
    expected = parse_state_json(made[f"{name.replace('.', '/')}/{ROOT}"].to_bytes())
    for key in sorted({*metadata, *expected} - {"attributes", "dimension_names"}):
        if json.dumps(metadata.get(key)) != json.dumps(expected.get(key)):
            raise StateCorrupt(f"{where}: its metadata say another {shown(key)} than ours would")
    if array.nchunks > len(sizes):
        raise StateCorrupt(f"{where}: chunks of it are missing")
    chunk_bytes = math.prod(chunks) * dtype.itemsize
    for index in np.ndindex(*array.cdata_shape):
        key = f"{name.replace('.', '/')}/{array.metadata.encode_chunk_key(index)}"
        if (size := sizes.get(key, 0)) != chunk_bytes:
            problem = f"{size} bytes instead of {chunk_bytes}" if size else "missing"
            raise StateCorrupt(f"{where}: its chunk {shown(key)} is {problem}")
    return shape, dtype


class _DigestingStore(WrapperStore[Store]):
    """A store for writing: it records all digests and skips contents that the store has already."""

    def __init__(self, store: Store, there: Mapping[str, str]) -> None:
        super().__init__(store)
        self._there = there
        self.digests: dict[str, str] = {}

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> None:
        """Return nothing: chunks are overwritten, and the part of a chunk outside the tensor is zeros."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if key != ROOT and key not in self.digests:
            await self.set(key, value)

    async def set(self, key: str, value: Buffer) -> None:
        self.digests[key] = await _digest(value)
        if self._there.get(key) != self.digests[key]:
            await self._store.set(key, value)


class _VerifyingStore(WrapperStore[Store]):
    """A store for reading: it returns only saved keys, and verifies metadata always, chunks if `verify`."""

    def __init__(self, store: Store, digests: Mapping[str, str], verify: bool) -> None:
        super().__init__(store)
        self.digests, self._verify = digests, verify

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        data = await self._store.get(key, prototype, byte_range)
        if key not in self.digests:
            return None
        where = f"tensor {shown(key.rpartition('/')[0].replace('/', '.'))}"
        if data is None:
            raise StateCorrupt(f"{where}: {shown(key)} is missing")
        if (self._verify or key.endswith(ROOT)) and await _digest(data) != self.digests[key]:
            raise StateCorrupt(f"{where}: its bytes are not those that were saved")
        return data


async def _digest(data: Buffer) -> str:
    view = as_bytes(data)
    return await asyncio.to_thread(bytes_digest, view) if len(view) > _SMALL_BYTES else bytes_digest(view)


def as_bytes(data: Buffer) -> memoryview:
    """Return the bytes of a buffer of the zarr library, without a copy."""
    return memoryview(data.as_numpy_array().data).cast("B")
