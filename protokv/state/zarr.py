"""A state as a `.zarr` folder, a Zarr v3 hierarchy that every zarr library opens.

    zarr.json                   the root group; its attribute "protokv" is the document
    bank/zarr.json              a group for each first part of the tensors' names
    bank/key_center/zarr.json   an array for each tensor: shape, dtype, dimension names, units and meaning
    bank/key_center/c.0.0.0.0   its numbers: one chunk, little-endian, uncompressed

bfloat16 is stored as uint16, and the attribute `torch_dtype` says so. A commit writes a complete folder and swaps it
with the old one. A reader trusts nothing: no file is a link, and an array is one chunk of exactly the bytes of its
shape, so that nothing decompresses or grows. The zarr library reads the metadata; it maps no chunks, so torch does.
Specification: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protokv.core.tensors import TensorSpec
from protokv.errors import StateCorrupt, StateError, shown, system_error
from protokv.state.commit import explain_write_errors, not_found, sync_folder, write_file
from protokv.state.digest import DTYPES, canonical_json
from protokv.state.form import Form, Stored
from protokv.state.header import KEY, State

if TYPE_CHECKING:
    import zarr

# The metadata file of a group or an array, and its most bytes; that of the root has the document.
METADATA = "zarr.json"
_LIMIT_BYTES, _ROOT_LIMIT_BYTES = 1 << 16, 2 << 20

# Far more files than a state has.
_MOST_FILES = 1 << 16

# Threads that write and sync files.
_WRITERS = 4

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if dtype != torch.bfloat16}


class ZarrForm(Form):
    """One `.zarr` folder."""

    suffix = ".zarr"
    kind = "folder"

    def check_target(self) -> None:
        """Raise StateError unless nothing is there, or a state, damaged or not."""
        super().check_target()
        with explain_write_errors(self.path):
            foreign = _find_foreign(self.target)
        if foreign:
            raise StateError(
                f"cannot write the state {self.path}: what is there is no state of ours, or more ({shown(foreign)})",
                hint="remove it, or choose another name",
            )

    def write(self, path: Path, document: str, state: State) -> None:
        """Write the folder. All threads have ended when this returns or raises."""
        import zarr

        # The library encodes into memory, without a copy of the numbers, so that all forms write their files alike.
        files: dict[str, Any] = {}
        root = zarr.create_group(zarr.storage.MemoryStore(files), attributes={KEY: json.loads(document)})
        for name, tensor in sorted(state.tensors.items()):
            numbers = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
            array = root.create_array(
                name.replace(".", "/"),
                shape=numbers.shape,
                dtype=numbers.dtype,
                chunks=_chunk_shape(numbers.shape),
                filters=None,
                compressors=None,
                chunk_key_encoding={"name": "default", "separator": "."},
                config={"write_empty_chunks": True},
                **_describe(name, tensor, state.tensor_info),
            )
            array[...] = numbers
        folders = {path / one for file in files for one in Path(file).parents}
        for one in sorted(folders):
            one.mkdir()

        def write(file: str) -> None:
            write_file(path / file, lambda out: out.write(files[file].as_numpy_array().data))

        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(write, files))
        for one in sorted(folders, reverse=True):
            sync_folder(one)

    def map(self, path: Path) -> Stored:
        """Check the metadata, and map the chunks."""
        import zarr

        if not any(path.iterdir()):
            # A user may make the folder first.
            raise not_found(self.path)
        sizes = _list_files(path)
        if METADATA not in sizes:
            raise StateCorrupt(f"it has no {METADATA}")
        root = zarr.open_group(path, mode="r", zarr_format=3, use_consolidated=False)
        document = dict(root.attrs).get(KEY)
        if not isinstance(document, dict):
            raise StateCorrupt(f"no zarr group of a state: it lacks the attribute {KEY}")
        digests = document.get("digests")
        names = digests if isinstance(digests, dict) else {}
        tensors = {name: _map_array(root, name, path, sizes) for name in names}
        return Stored(canonical_json(document), tensors, sum(sizes.values()))


def _chunk_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, n) for n in shape)


def _describe(name: str, tensor: Tensor, info: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return the names of the axes, and what else other programs can show of an array."""
    attributes = {"torch_dtype": "bfloat16"} if tensor.dtype == torch.bfloat16 else {}
    known = info.get(name)
    if known is None or len(known.dims) != tensor.dim():
        last = name.rpartition(".")[2]
        return {"attributes": attributes, "dimension_names": [f"{last}_{axis}" for axis in range(tensor.dim())]}
    attributes |= {key: value for key, value in (("long_name", known.meaning), ("units", known.unit)) if value}
    return {"attributes": attributes, "dimension_names": list(known.dims)}


def _map_array(root: zarr.Group, name: str, path: Path, sizes: Mapping[str, int]) -> Tensor:
    """Return the mapped tensor of an array. StateCorrupt, naming it, if it is not as we write it."""
    import zarr
    from zarr.codecs import BytesCodec

    where, folder = f"tensor {shown(name)}", name.replace(".", "/")
    try:
        array = root[folder]
    except Exception as error:
        if system_error(error) is not None:
            raise
        raise StateCorrupt(f"{where}: its metadata are not those of an array ({shown(error)})") from None
    if not isinstance(array, zarr.Array) or array.metadata.zarr_format != 3:
        raise StateCorrupt(f"{where}: it is no array")
    shape, (codec, *codecs) = array.shape, array.metadata.codecs
    is_bfloat16 = (array.dtype.name, array.attrs.get("torch_dtype")) == ("uint16", "bfloat16")
    dtype = torch.bfloat16 if is_bfloat16 else _DTYPES.get(array.dtype.name)
    if dtype is None:
        raise StateCorrupt(f"{where}: a state cannot hold {shown(array.dtype.name)}")
    plain = isinstance(codec, BytesCodec) and (dtype.itemsize == 1 or codec == BytesCodec())
    if not plain or codecs or array.metadata.storage_transformers or array.chunks != _chunk_shape(shape):
        raise StateCorrupt(f"{where}: its numbers are not one chunk of little-endian bytes")
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    chunk = f"{folder}/{array.metadata.encode_chunk_key((0,) * len(shape))}"
    if (size := sizes.get(chunk, 0)) != count * dtype.itemsize:
        raise StateCorrupt(f"{where}: {size} bytes instead of {count * dtype.itemsize}")
    return torch.from_file(str(path / chunk), shared=False, size=count, dtype=dtype).reshape(shape)


def _list_files(root: Path) -> dict[str, int]:
    """Return the bytes of every file by its path from the root.

    Raises:
        StateCorrupt: there is a link or a device, or metadata that are missing or too long.
    """
    sizes: dict[str, int] = {}
    folders = [(root, "")]
    for folder, prefix in folders:
        with os.scandir(folder) as entries:
            for one in entries:
                name = prefix + one.name
                if one.is_dir(follow_symlinks=False):
                    folders.append((folder / one.name, f"{name}/"))
                elif one.is_file(follow_symlinks=False):
                    sizes[name] = size = one.stat(follow_symlinks=False).st_size
                    if one.name == METADATA and size > (_LIMIT_BYTES if prefix else _ROOT_LIMIT_BYTES):
                        raise StateCorrupt(f"{shown(name)}: {size} bytes are too many")
                else:
                    raise StateCorrupt(f"{shown(name)} is neither a file nor a folder")
                if len(sizes) + len(folders) > _MOST_FILES:
                    raise StateCorrupt(f"more than {_MOST_FILES} files")
    return sizes


def _find_foreign(target: Path) -> str:
    """Return a file there that belongs to no state of ours; empty if the folder may be replaced."""
    if not target.is_dir() or not any(target.iterdir()):
        return ""
    root = target / METADATA
    ours = root.is_file() and not root.is_symlink() and root.stat().st_size <= _ROOT_LIMIT_BYTES
    if not ours or f'"{KEY}"'.encode() not in root.read_bytes():
        return METADATA
    # os.walk does not enter a link to a folder; the link goes with the state.
    for folder, _, files in os.walk(target, onerror=_fail):
        for name in files:
            if name != METADATA and not re.fullmatch(r"c(\.\d+)*", name):
                return str(Path(folder, name).relative_to(target))
    return ""


def _fail(error: OSError) -> None:
    # A folder that cannot be listed is not an empty one.
    raise error
