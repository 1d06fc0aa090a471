"""A state as a `.zarr` folder, a Zarr v3 hierarchy, made and opened with the zarr library.

    zarr.json                   the root group; its attribute "protokv" is the document
    bank/zarr.json              a group for each first part of the tensors' names
    bank/key_center/zarr.json   an array for each tensor: shape, dtype, axes, units, meaning
    bank/key_center/c.0.0.0.0   its numbers: one chunk, little-endian, uncompressed

bfloat16 is stored as uint16, and the attribute `torch_dtype` says so. A reader trusts nothing:
every file is a plain one inside the folder, and an array is one chunk with the bytes of its shape,
so that nothing decompresses or grows. Specification:
https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html"""

from __future__ import annotations

import json
import math
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protokv.core.tensors import TensorSpec
from protokv.errors import StateCorrupt, escape_text, find_system_error
from protokv.state.commit import make_state_not_found, sync_folder, write_state_file
from protokv.state.forms import StateForm, StoredState
from protokv.state.header import DTYPE_NAMES, HEADER_KEY, State, make_canonical_json

if TYPE_CHECKING:
    import zarr

# The metadata file of a group or an array, and its most bytes; that of the root has the document.
_METADATA = "zarr.json"
_LIMIT_BYTES = 2 << 20

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


class ZarrForm(StateForm):
    """One `.zarr` folder."""

    suffix = ".zarr"
    is_folder = True

    def write(self, path: Path, document: str, state: State) -> None:
        """Write the folder. All threads have ended when this returns or raises."""
        import zarr

        # The library's own store of files syncs none and needs hard links. Numbers in memory are
        # not copied.
        files: dict[str, Any] = {}
        root = zarr.create_group(files, attributes={HEADER_KEY: json.loads(document)})
        known = {spec.name: spec for spec in state.specs}
        for name, tensor in sorted(state.tensors.items()):
            root.create_array(
                name.replace(".", "/"),
                data=(
                    tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
                ).numpy(),
                chunks=tuple(max(1, n) for n in tensor.shape),
                compressors=None,
                chunk_key_encoding={"name": "default", "separator": "."},
                config={"write_empty_chunks": True},
                **_describe(name, tensor, known.get(name)),
            )
        folders = sorted({path / one for file in files for one in Path(file).parents})
        for one in folders:
            one.mkdir()
        with ThreadPoolExecutor(4) as pool:  # disks sync several files at once
            list(
                pool.map(
                    lambda one: write_state_file(
                        path / one, lambda to: to.write(files[one].as_buffer_like())
                    ),
                    files,
                )
            )
        for one in reversed(folders):
            sync_folder(one)

    def map(self, path: Path) -> StoredState:
        """Check the metadata, and map the chunks."""
        import zarr

        if not any(path.iterdir()):  # a user may make the folder first
            raise make_state_not_found(path)
        nbytes = _measure(path, _METADATA)
        root = zarr.open_group(path, mode="r", zarr_format=3, use_consolidated=False)
        document = root.attrs.get(HEADER_KEY)
        if not isinstance(document, dict):
            raise StateCorrupt(f"no zarr group of a state: it lacks the attribute {HEADER_KEY}")
        tensors = {}
        for name in document["digests"]:
            try:
                tensors[name], size = _map_array(root, name, path)
            except Exception as error:
                if find_system_error(error) is not None:
                    raise
                raise StateCorrupt(f"tensor {escape_text(name)}: {escape_text(error)}") from error
            nbytes += size
        return StoredState(make_canonical_json(document), tensors, nbytes)

    def is_foreign(self, path: Path) -> bool:
        """Return True for a file, and for a folder with something in it that is no state of
        ours.
        """
        if not path.is_dir():
            return True
        root = path / _METADATA
        return any(path.iterdir()) and not (
            root.is_file() and f'"{HEADER_KEY}"'.encode() in root.read_bytes()
        )


def _describe(name: str, tensor: Tensor, known: TensorSpec | None) -> dict[str, Any]:
    """Return the names of the axes, and what else other programs can show of an array."""
    attributes = {"torch_dtype": "bfloat16"} if tensor.dtype == torch.bfloat16 else {}
    axes = [f"{name.rpartition('.')[2]}_{axis}" for axis in range(tensor.dim())]
    if known is not None:
        attributes |= {
            key: text for key, text in (("long_name", known.meaning), ("units", known.unit)) if text
        }
        axes = list(known.dims)
    return {"attributes": attributes, "dimension_names": axes}


def _map_array(root: zarr.Group, name: str, path: Path) -> tuple[Tensor, int]:
    """Return the mapped tensor of an array and its stored bytes. StateCorrupt if it is not as we
    write it.
    """
    import zarr.codecs

    folder = name.replace(".", "/")
    nbytes = _measure(path, f"{folder}/{_METADATA}")
    array: Any = root[folder]
    shape = array.shape
    stored = array.dtype.name
    is_bfloat16 = (stored, array.attrs.get("torch_dtype")) == ("uint16", "bfloat16")
    dtype = torch.bfloat16 if is_bfloat16 else _DTYPES.get(stored)
    if dtype is None or array.ndim > 64:  # NumPy has no more
        raise StateCorrupt(f"a state cannot hold {array.ndim} axes of {stored}")
    if not (count := math.prod(shape)):
        return torch.empty(shape, dtype=dtype), nbytes
    plain = zarr.codecs.BytesCodec(endian="little" if dtype.itemsize > 1 else None)
    coding = array.shards, array.chunks, array.filters, array.serializer, array.compressors
    if coding != (None, shape, (), plain, ()):
        raise StateCorrupt("its numbers are not one chunk of little-endian bytes")
    chunk = f"{folder}/{array.metadata.encode_chunk_key((0,) * len(shape))}"
    if (size := _measure(path, chunk)) != count * dtype.itemsize:
        raise StateCorrupt(f"{size} bytes instead of {count * dtype.itemsize}")
    return torch.from_file(str(path / chunk), shared=False, size=count, dtype=dtype).reshape(
        shape
    ), nbytes + size


def _measure(root: Path, name: str) -> int:
    """Return the bytes of a file of the folder. StateCorrupt if it is missing, a link, a device or
    too long.
    """
    path = root / name
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise StateCorrupt(f"it has no {escape_text(name)}") from None
    if not stat.S_ISREG(found.st_mode) or os.path.realpath(path) != str(path):
        raise StateCorrupt(f"{escape_text(name)} is no file of the folder")
    if path.name == _METADATA and found.st_size > _LIMIT_BYTES:
        raise StateCorrupt(f"{escape_text(name)}: {found.st_size} bytes are too many")
    return found.st_size
