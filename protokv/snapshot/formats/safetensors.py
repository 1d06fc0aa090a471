"""A state as one `.safetensors` file: readable by every safetensors library, verified by ours.

The header goes as JSON into `__metadata__` under "protokv", with a digest of every tensor and one of itself. The file
is read through the library, after its header was read as untrusted data: every size must be in the file before anything
is made of it. It is written here, to the library's layout, because the library's `save_file` takes its own way to the
disk: 3.2 s for 550 MB where a plain write takes 0.8 s (0.8.0, with fsync, Linux), and no error of it can be told
from another. Layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from protokv.errors import StateError
from protokv.snapshot.commit import replace_file
from protokv.snapshot.digest import copy_and_digest, raw, tensor_digests
from protokv.snapshot.document import (
    DTYPES,
    as_tensors,
    check_names,
    corrupt,
    dtype_name,
    is_shape,
    is_still,
    open_state,
    parse_json,
    seal,
    unreadable,
    unseal,
)
from protokv.snapshot.filesystem import write_file
from protokv.snapshot.formats.base import StatePath
from protokv.snapshot.formats.local import FileForm
from protokv.snapshot.schema import Header, State
from protokv.snapshot.text import shown

KEY = "protokv"

# A real header takes some 20 kB.
HEADER_LIMIT_BYTES = 1 << 20

# A writer that commits faster than a header is read does not last.
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class _Head:
    """What a file says before its tensors."""

    header: Header
    digests: Mapping[str, str]
    entries: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype name and shape


class SafetensorsForm(FileForm):
    """One `.safetensors` file."""

    suffix = ".safetensors"

    def replace(self, state: State, path: StatePath) -> None:
        """Put the file in place."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
        named = {name: (dtype_name(name, tensor.dtype), tensor) for name, tensor in tensors.items()}
        document = seal(state, digests=tensor_digests(named, state.format_version))
        # Widest elements first, so that every tensor begins at a multiple of its element size.
        order = sorted(named, key=lambda name: (-tensors[name].element_size(), name))
        begin, described = 0, {}
        for name in order:
            dtype, tensor = named[name]
            end = begin + tensor.nbytes
            described[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
            begin = end
        head = json.dumps({"__metadata__": {KEY: document}, **described}, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        if len(head) > HEADER_LIMIT_BYTES:
            raise StateError(
                f"the header of the state takes {len(head)} bytes, at most {HEADER_LIMIT_BYTES} are allowed"
            )

        def parts() -> Iterator[bytes | memoryview]:
            yield len(head).to_bytes(8, "little") + head
            for name in order:
                yield raw(tensors[name]).data

        replace_file(path, lambda temporary: write_file(temporary, parts(), self.fs), self.fs)

    def read(self, path: StatePath, *, verify: bool = True) -> State:
        """Read the file."""
        for _ in range(_ATTEMPTS):
            with open_state(path) as file:
                head = _read_head(file, path)
                version = head.header.format_version
                try:
                    with safe_open(path, framework="pt", device="cpu") as library:
                        # The library opens the path once more, and it may have been replaced since.
                        if not is_still(file, path):
                            continue
                        mapped = {name: (dtype, library.get_tensor(name)) for name, (dtype, _) in head.entries.items()}
                except (SafetensorError, OSError, RuntimeError, ValueError) as error:
                    if not is_still(file, path):
                        continue
                    raise corrupt(path, f"the library cannot read it ({shown(error)})") from error
                for name, (dtype, shape) in head.entries.items():
                    if tuple(mapped[name][1].shape) != shape or mapped[name][1].dtype != DTYPES[dtype]:
                        raise corrupt(path, f"tensor {shown(name)}: the library reads something else than was saved")
                found = copy_and_digest(mapped, version)
            return State.of(head.header, as_tensors(found, head.digests if verify else None, path))
        raise StateError(f"{os.fspath(path)} is replaced faster than it can be read", hint="try again")

    def read_header(self, path: StatePath) -> Header:
        """Read and verify the header alone."""
        with open_state(path) as file:
            return _read_head(file, path).header


def _read_head(file: BinaryIO, path: StatePath) -> _Head:
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise corrupt(path, f"expected a state, the file has {size} bytes")
    length = int.from_bytes(_read(file, 8, path), "little")
    if length > min(HEADER_LIMIT_BYTES, size - 8):
        raise corrupt(path, f"header: a length of {length} bytes in a file of {size}")
    outer = parse_json(_read(file, length, path), path)
    metadata = outer.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(KEY), str):
        raise corrupt(path, f"a safetensors file but no state: it lacks the field {KEY}")
    if set(metadata) != {KEY}:
        raise corrupt(path, "header: unknown metadata")
    document = parse_json(metadata[KEY].encode("utf-8", "surrogatepass"), path)
    header, parts = unseal(document, {"digests"}, path)
    entries = _entries(outer, size - 8 - length, path)
    return _Head(header, check_names(set(entries), parts["digests"], path), entries)


def _entries(outer: Mapping[str, Any], room: int, path: StatePath) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape by name; whatever lies elsewhere than in the file, side by side without gaps, is refused."""
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    spans: list[tuple[int, int, str]] = []
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
        entries[name] = (dtype, tuple(shape))
        spans.append((offsets[0], offsets[1], name))
    end = 0
    for begin, stop, name in sorted(spans):
        if begin != end:
            raise corrupt(path, f"tensor {shown(name)}: there is a gap or an overlap before it")
        end = stop
    if end != room:
        raise corrupt(path, f"expected {end} bytes of tensors, the file has {room}")
    return entries


def _read(file: BinaryIO, size: int, path: StatePath) -> bytes:
    try:
        data = file.read(size)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) != size:
        raise corrupt(path, "header: the file ends within it")
    return data
