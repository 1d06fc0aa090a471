"""A state as a `.zarr` folder, a Zarr v3 hierarchy that every zarr library opens.

    zarr.json                   the root group; its attribute "protokv" is the document
    bank/zarr.json              a group for each first part of the tensors' names
    bank/key_center/zarr.json   an array for each tensor: shape, dtype, dimension names, units and meaning
    bank/key_center/c.0.0.0.0   its numbers: one chunk, little-endian, uncompressed

bfloat16 is stored as uint16, and the attribute `torch_dtype` says so. A commit writes a complete folder and swaps it
with the old one. A reader trusts nothing: it reads only files that are no links, whose metadata are exactly those that
this module writes for the shape, and maps chunks of exactly the size that the shape gives, so nothing decompresses or
grows. Specification: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from protokv.core.tensors import TensorSpec
from protokv.errors import StateCorrupt, StateError, shown
from protokv.state.commit import explain_write_errors, not_found, sync_folder, write_file
from protokv.state.digest import DTYPES, canonical_json, tensor_bytes
from protokv.state.form import Form, Stored
from protokv.state.header import KEY, State, parse_object

# The metadata file of a group or an array.
METADATA = "zarr.json"

# The root's metadata hold the document again as an object, with spaces if another program has written them.
_ROOT_LIMIT_BYTES = 2 << 20
_ARRAY_LIMIT_BYTES = 1 << 16

# Far more files than a state has.
_MOST_FILES = 1 << 16

# Threads that write and sync files.
_WRITERS = 4

_GROUP: Mapping[str, Any] = {"zarr_format": 3, "node_type": "group"}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if dtype != torch.bfloat16}
_Shape = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**40)], ...], Meta(max_length=16)]


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
        files: dict[str, bytes | memoryview] = {
            METADATA: _encode({**_GROUP, "attributes": {KEY: json.loads(document)}})
        }
        for name, tensor in sorted(state.tensors.items()):
            folder = name.replace(".", "/")
            parents = folder.split("/")[:-1]
            files |= {"/".join((*parents[: n + 1], METADATA)): _encode(_GROUP) for n in range(len(parents))}
            described = _metadata(tuple(tensor.shape), tensor.dtype) | _description(name, tensor, state.tensor_info)
            files[f"{folder}/{METADATA}"] = _encode(described)
            if tensor.numel():
                files[f"{folder}/{_chunk_name(tensor.dim())}"] = tensor_bytes(tensor).data
        folders = {path / one for file in files for one in Path(file).parents}
        for one in sorted(folders):
            one.mkdir()
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(lambda file: write_file(path / file, lambda out: out.write(files[file])), files))
        for one in sorted(folders, reverse=True):
            sync_folder(one)

    def map(self, path: Path) -> Stored:
        """Check the metadata, and map the chunks."""
        if not any(path.iterdir()):
            # A user may make the folder first.
            raise not_found(self.path)
        sizes = _list_files(path)
        root = _read_metadata(path, METADATA, sizes, _ROOT_LIMIT_BYTES)
        attributes = root.pop("attributes", None)
        if root != _GROUP or not isinstance(attributes, dict) or not isinstance(attributes.get(KEY), dict):
            raise StateCorrupt(f"no zarr group of a state: it lacks the attribute {KEY}")
        document = canonical_json(attributes[KEY])
        names = attributes[KEY].get("digests")
        tensors = {str(name): _map_array(path, str(name), sizes) for name in names if isinstance(names, dict)}
        return Stored(document, tensors, sum(sizes.values()))


def _map_array(root: Path, name: str, sizes: Mapping[str, int]) -> Tensor:
    """Return the mapped tensor of an array. StateCorrupt, naming it, if it is not as we write it."""
    where, folder = f"tensor {shown(name)}", name.replace(".", "/")
    metadata = _read_metadata(root, f"{folder}/{METADATA}", sizes, _ARRAY_LIMIT_BYTES)
    attributes = metadata.pop("attributes", None)
    metadata.pop("dimension_names", None)
    try:
        shape = msgspec.convert(metadata.get("shape"), _Shape)
        is_bfloat16 = (metadata["data_type"], attributes.get("torch_dtype")) == ("uint16", "bfloat16")
        dtype = torch.bfloat16 if is_bfloat16 else _DTYPES[metadata["data_type"]]
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
        raise StateCorrupt(f"{where}: its metadata are not those of a tensor ({shown(error)})") from None
    expected = _metadata(shape, dtype)
    for key in sorted({*metadata, *expected}):
        if _encode(metadata.get(key)) != _encode(expected.get(key)):
            raise StateCorrupt(f"{where}: its metadata say another {shown(key)} than ours would")
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    chunk = f"{folder}/{_chunk_name(len(shape))}"
    if (size := sizes.get(chunk, 0)) != count * dtype.itemsize:
        raise StateCorrupt(f"{where}: {size} bytes instead of {count * dtype.itemsize}")
    return torch.from_file(str(root / chunk), shared=False, size=count, dtype=dtype).reshape(shape)


def _metadata(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Return the metadata of an array, without names and attributes."""
    little = {} if dtype.itemsize == 1 else {"configuration": {"endian": "little"}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": "uint16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, size) for size in shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": False if dtype == torch.bool else 0,
        "codecs": [{"name": "bytes", **little}],
    }


def _description(name: str, tensor: Tensor, info: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return the names of the axes, and what else other programs can show of an array."""
    attributes = {"torch_dtype": "bfloat16"} if tensor.dtype == torch.bfloat16 else {}
    known = info.get(name)
    if known is None or len(known.dims) != tensor.dim():
        last = name.rpartition(".")[2]
        return {"attributes": attributes, "dimension_names": [f"{last}_{axis}" for axis in range(tensor.dim())]}
    attributes |= {key: value for key, value in (("long_name", known.meaning), ("units", known.unit)) if value}
    return {"attributes": attributes, "dimension_names": list(known.dims)}


def _chunk_name(dims: int) -> str:
    return ".".join(["c", *["0"] * dims])


def _encode(metadata: object) -> bytes:
    return json.dumps(metadata, indent=1, sort_keys=True).encode()


def _list_files(root: Path) -> dict[str, int]:
    """Return the bytes of every file by its path from the root. StateCorrupt if there is a link or a device."""
    sizes: dict[str, int] = {}
    folders = [(root, "")]
    for folder, prefix in folders:
        with os.scandir(folder) as entries:
            for one in entries:
                if one.is_dir(follow_symlinks=False):
                    folders.append((folder / one.name, f"{prefix}{one.name}/"))
                elif one.is_file(follow_symlinks=False):
                    sizes[prefix + one.name] = one.stat(follow_symlinks=False).st_size
                else:
                    raise StateCorrupt(f"{shown(prefix + one.name)} is neither a file nor a folder")
                if len(sizes) + len(folders) > _MOST_FILES:
                    raise StateCorrupt(f"more than {_MOST_FILES} files")
    return sizes


def _read_metadata(root: Path, file: str, sizes: Mapping[str, int], limit: int) -> dict[str, Any]:
    """Return the object in a metadata file. StateCorrupt if it is missing, too long, or no object."""
    if not 0 < (size := sizes.get(file, 0)) <= limit:
        raise StateCorrupt(f"{shown(file)}: it is missing or has {size} bytes")
    return parse_object((root / file).read_bytes(), shown(file))


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
