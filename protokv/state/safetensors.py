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

from protokv.state.commit import write_file
from protokv.state.digest import NAMES, tensor_bytes
from protokv.state.form import Form, Stored
from protokv.state.header import KEY, State


class SafetensorsForm(Form):
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

        def fill(file: BinaryIO) -> None:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in order:
                file.write(tensor_bytes(state.tensors[name]).data)

        write_file(path, fill)

    def map(self, path: Path) -> Stored:
        """Map the file. The library checks the head, offsets and shapes against its size."""
        with safe_open(path, framework="pt", device="cpu") as library:
            tensors = {name: library.get_tensor(name) for name in library.keys()}  # noqa: SIM118
            return Stored((library.metadata() or {}).get(KEY), tensors, path.stat().st_size)
