"""A state as one `.safetensors` file, which every safetensors library reads.

8 bytes with the length of the head, the head as JSON, the tensors. The document of the state is the entry `protokv` of
`__metadata__` in the head. The library's own `save_file` is four times slower and hides why a write failed.
Layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

from safetensors import safe_open

from protokv.errors import StateCorrupt
from protokv.state.commit import write_file
from protokv.state.digest import NAMES, tensor_bytes
from protokv.state.form import LocalForm, Stored
from protokv.state.header import HEADER_LIMIT_BYTES, KEY, Header, State, check_length, parse_object, unseal


class SafetensorsForm(LocalForm):
    """One `.safetensors` file."""

    suffix = ".safetensors"

    def write(self, path: Path, document: str, state: State) -> None:
        """Write the head and the tensors."""
        # The widest dtypes come first, so that every tensor is aligned to its element size.
        order = sorted(state.tensors, key=lambda name: (-state.tensors[name].element_size(), name))
        begin, entries = 0, {}
        for name in order:
            tensor = state.tensors[name]
            end = begin + tensor.nbytes
            entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            entries[name], begin = entry, end
        head = json.dumps({"__metadata__": {KEY: document}, **entries}, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        check_length(len(head))

        def fill(file: BinaryIO) -> None:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in order:
                file.write(tensor_bytes(state.tensors[name]).data)

        write_file(path, fill)

    def map(self, path: Path) -> Stored:
        """Map the file. The library checks offsets and shapes against its size."""
        size = path.stat().st_size
        with path.open("rb") as file:
            # A false length must not make the library allocate.
            check_head_length(file.read(8), size)
        with safe_open(path, framework="pt", device="cpu") as library:
            document = (library.metadata() or {}).get(KEY)
            return Stored(document, {name: library.get_tensor(name) for name in library.keys()}, size)  # noqa: SIM118


def check_head_length(start: bytes, size: int) -> int:
    """Return the length of the head of a file of `size` bytes that starts with these 8. StateCorrupt if impossible."""
    length = int.from_bytes(start, "little")
    if length > min(HEADER_LIMIT_BYTES, size - 8):
        raise StateCorrupt(f"header: a length of {length} bytes in a file of {size}")
    return length


def parse_header(start: bytes, size: int) -> Header:
    """Return the header of a file of `size` bytes from its first bytes, at most 8 and `HEADER_LIMIT_BYTES`.

    Raises:
        StateCorrupt, StateMismatch: as `unseal`.
    """
    head = parse_object(start[8 : 8 + check_head_length(start[:8], size)], "header")
    metadata = head.get("__metadata__")
    return unseal(metadata.get(KEY) if isinstance(metadata, dict) else None)[0]
