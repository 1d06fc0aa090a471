"""A state as a `.zarr` folder, a Zarr v3 hierarchy that every zarr library opens.

    zarr.json                   the root group; its attribute "protokv" is the document
    bank/zarr.json              a group for each first part of the tensors' names
    bank/key_center/zarr.json   an array for each tensor: shape, dtype, dimension names, units and meaning
    bank/key_center/c.0.0.0.0   its numbers: one chunk, little-endian, uncompressed

bfloat16 is stored as uint16, and the attribute `torch_dtype` says so. An array is read only if its metadata are those
that are written here and its chunk has the bytes of its shape, so that nothing decompresses or grows.
Specification: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from protokv.core.tensors import TensorSpec
from protokv.errors import StateCorrupt, shown
from protokv.state.commit import not_found, sync_folder, write_file
from protokv.state.forms import Form, Stored
from protokv.state.header import KEY, NAMES, State, canonical_json, tensor_bytes

# The metadata file of a group or an array, and its most bytes; that of the root has the document.
METADATA, _LIMIT_BYTES, _ROOT_LIMIT_BYTES = "zarr.json", 1 << 16, 2 << 20

# Threads that write and sync files.
_WRITERS = 4

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}


class ZarrForm(Form):
    """One `.zarr` folder."""

    suffix = ".zarr"
    is_folder = True

    def write(self, path: Path, document: str, state: State) -> None:
        """Write the folder. All threads have ended when this returns or raises."""
        known = {spec.name: spec for spec in state.specs}
        files: dict[str, Any] = {METADATA: _encode({"attributes": {KEY: json.loads(document)}})}
        for name, tensor in sorted(state.tensors.items()):
            folder = name.replace(".", "/")
            for above in PurePosixPath(folder).parents[:-1]:
                files[f"{above}/{METADATA}"] = _encode({})
            described = _describe(name, tensor, known.get(name))
            files[f"{folder}/{METADATA}"] = _encode(_array(tuple(tensor.shape), tensor.dtype) | described)
            if tensor.numel():
                files[f"{folder}/{_chunk(tensor.dim())}"] = tensor_bytes(tensor).data
        folders = sorted({path / one for file in files for one in Path(file).parents})
        for one in folders:
            one.mkdir()
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(lambda file: write_file(path / file, lambda out: out.write(files[file])), files))
        for one in reversed(folders):
            sync_folder(one)

    def map(self, path: Path) -> Stored:
        """Check the metadata, and map the chunks."""
        if not any(path.iterdir()):
            # A user may make the folder first.
            raise not_found(path)
        sizes: dict[str, int] = {}
        attributes = _read(path, METADATA, sizes, _ROOT_LIMIT_BYTES).get("attributes")
        document = attributes.get(KEY) if isinstance(attributes, dict) else None
        if not isinstance(document, dict):
            raise StateCorrupt(f"no zarr group of a state: it lacks the attribute {KEY}")
        digests = document.get("digests")
        tensors = {name: _map_array(path, name, sizes) for name in (digests if isinstance(digests, dict) else ())}
        return Stored(canonical_json(document), tensors, sum(sizes.values()))

    def is_foreign(self, path: Path) -> bool:
        """Return True for a file, and for a folder with something in it that is no state of ours."""
        if not path.is_dir():
            return True
        root = path / METADATA
        return any(path.iterdir()) and not (root.is_file() and f'"{KEY}"'.encode() in root.read_bytes())


def _encode(metadata: Mapping[str, Any]) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}, **metadata}, indent=2).encode()


def _array(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Return the metadata that the numbers of an array depend on: one chunk of plain bytes."""
    stored = torch.uint16 if dtype == torch.bfloat16 else dtype
    codec: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    return {
        "node_type": "array",
        "shape": list(shape),
        "data_type": str(stored).removeprefix("torch."),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [codec],
        "fill_value": torch.zeros((), dtype=dtype).item(),
        "storage_transformers": [],
    }


def _chunk(axes: int) -> str:
    return ".".join(["c", *["0"] * axes])


def _describe(name: str, tensor: Tensor, known: TensorSpec | None) -> dict[str, Any]:
    """Return the names of the axes, and what else other programs can show of an array."""
    attributes = {"torch_dtype": "bfloat16"} if tensor.dtype == torch.bfloat16 else {}
    axes = [f"{name.rpartition('.')[2]}_{axis}" for axis in range(tensor.dim())]
    if known is not None and len(known.dims) == len(axes):
        attributes |= {key: text for key, text in (("long_name", known.meaning), ("units", known.unit)) if text}
        axes = list(known.dims)
    return {"attributes": attributes, "dimension_names": axes}


def _map_array(path: Path, name: str, sizes: dict[str, int]) -> Tensor:
    """Return the mapped tensor of an array. StateCorrupt, naming it, if it is not as we write it."""
    folder, where = name.replace(".", "/"), f"tensor {shown(name)}"
    found = _read(path, f"{folder}/{METADATA}", sizes, _LIMIT_BYTES)
    attributes, shape = found.get("attributes"), found.get("shape")
    is_bfloat16 = isinstance(attributes, dict) and attributes.get("torch_dtype") == "bfloat16"
    dtype = torch.bfloat16 if is_bfloat16 else _DTYPES.get(str(found.get("data_type")))
    if dtype is None or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise StateCorrupt(f"{where}: a state cannot hold {shown(found.get('data_type'))} {shown(shape)}")
    if any(found.get(field) != value for field, value in _array(tuple(shape), dtype).items()):
        raise StateCorrupt(f"{where}: its numbers are not one chunk of little-endian bytes")
    if not (count := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    chunk = _find(path, f"{folder}/{_chunk(len(shape))}", sizes)
    if (size := chunk.stat().st_size) != count * dtype.itemsize:
        raise StateCorrupt(f"{where}: {size} bytes instead of {count * dtype.itemsize}")
    return torch.from_file(str(chunk), shared=False, size=count, dtype=dtype).reshape(shape)


def _find(root: Path, name: str, sizes: dict[str, int]) -> Path:
    """Return a file of the folder, and note its size. StateCorrupt if it is missing, a link or a device."""
    path = root / name
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise StateCorrupt(f"it has no {shown(name)}") from None
    if not stat.S_ISREG(found.st_mode) or os.path.realpath(path) != str(path):
        raise StateCorrupt(f"{shown(name)} is no file of the folder")
    sizes[name] = found.st_size
    return path


def _read(root: Path, name: str, sizes: dict[str, int], most: int) -> dict[str, Any]:
    path = _find(root, name, sizes)
    if sizes[name] > most:
        raise StateCorrupt(f"{shown(name)}: {sizes[name]} bytes are too many")
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise StateCorrupt(f"{shown(name)}: no metadata of zarr")
    return found
