"""What a form of a state is, and `.safetensors`; `protokv.state.pt` and `protokv.state.zarr` have
the others.

A form says how the document and the tensors of a state lie in the bytes at a path, and nothing
else; locks, commits and kept commits are the same for all (`protokv.state.store`).

`.safetensors` has 8 bytes with the length of the head, the head as JSON, and the tensors. The
document is the entry `protokv` of `__metadata__` in the head. The own `save_file` of the library
takes four times as long and hides why a write failed.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, ClassVar

from safetensors import safe_open

from protokv.core.tensors import TensorDict, Tensors
from protokv.errors import StateCorrupt
from protokv.state.commit import write_state_file
from protokv.state.header import (
    DTYPE_NAMES,
    HEADER_KEY,
    State,
    digest_tensors,
    unseal_header,
    view_tensor_bytes,
)


class StoredState:
    """A state of `nbytes` stored bytes whose `header` is verified. Its tensors are mapped, not read
    yet.
    """

    def __init__(self, document: object, tensors: Tensors, nbytes: int) -> None:
        """Check everything that needs no byte of a tensor. StateCorrupt; StateMismatch if a newer
        version wrote it.
        """
        self.header, self._digests = unseal_header(document)
        self._tensors = tensors
        self.nbytes = nbytes
        if set(self._digests) != set(tensors):
            raise StateCorrupt("digests: expected one for every tensor and no other")
        # Tensors that share bytes could take far more memory than the file.
        if (needed := sum(one.nbytes for one in tensors.values())) > nbytes:
            raise StateCorrupt(f"tensors of {needed} bytes do not fit the file")

    def read(self, verify: bool = True, names: Collection[str] | None = None) -> TensorDict:
        """Return copies of the tensors, or of those named; check their digests if `verify`.
        StateCorrupt.
        """
        copies = {
            name: one.clone()
            for name, one in self._tensors.items()
            if names is None or name in names
        }
        for name, digest in digest_tensors(copies).items() if verify else ():
            if digest != self._digests[name]:
                raise StateCorrupt(f"tensor {name}: its bytes are not those that were saved")
        return copies


class StateForm(ABC):
    """How a state lies at a path: `suffix` chooses it, and `is_folder` says what is there."""

    suffix: ClassVar[str]
    is_folder: ClassVar[bool] = False

    @abstractmethod
    def write(self, path: Path, document: str, state: State) -> None:
        """Create and sync the file or folder. The tensors are contiguous and on the CPU.
        OSError.
        """

    @abstractmethod
    def map(self, path: Path) -> StoredState:
        """Map the tensors of the file or folder. An exception of a library means that it is no
        state.
        """

    def is_foreign(self, path: Path) -> bool:
        """Return True if what is at the path is no state, damaged or not, and must not be
        replaced.
        """
        return not path.is_file()


class SafetensorsForm(StateForm):
    """One `.safetensors` file."""

    suffix = ".safetensors"

    def write(self, path: Path, document: str, state: State) -> None:
        """Write the head and the tensors."""
        # The widest dtypes come first, so that every tensor is aligned to its element size.
        order = sorted(state.tensors.items(), key=lambda one: (-one[1].element_size(), one[0]))
        begin = 0
        entries = {}
        for name, tensor in order:
            end = begin + tensor.nbytes
            entry = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            entries[name], begin = entry, end
        head = json.dumps(
            {"__metadata__": {HEADER_KEY: document}, **entries}, separators=(",", ":")
        ).encode()
        head += b" " * (-len(head) % 8)

        def fill(file: BinaryIO) -> None:
            file.write(len(head).to_bytes(8, "little") + head)
            for _, tensor in order:
                file.write(view_tensor_bytes(tensor).data)

        write_state_file(path, fill)

    def map(self, path: Path) -> StoredState:
        """Map the file. The library checks the head, offsets and shapes against its size."""
        with safe_open(path, framework="pt", device="cpu") as library:
            tensors = {name: library.get_tensor(name) for name in library.keys()}  # noqa: SIM118
            return StoredState(
                (library.metadata() or {}).get(HEADER_KEY), tensors, path.stat().st_size
            )
