"""A state as one `.pt` file, which `torch.load(weights_only=True)` of other programs reads.

The file is `{"protokv": document, "tensors": {name: tensor}}` as `torch.save` writes it: a zip
archive with a pickle and the bytes of each tensor. Reading never unpickles. Even the restricted
unpickler of torch calls `bytearray(n)` and hashes nested tuples, so that a thousand bytes take all
memory or hours. The arguments of the opcodes in their order are all that a state needs.
https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch

from protokv.errors import StateCorrupt
from protokv.state.commit import write_state_file
from protokv.state.forms import StateForm, StoredState
from protokv.state.header import DTYPE_NAMES, HEADER_KEY, MOST_HEADER_BYTES, State

# A pickle has the document and some 300 bytes a tensor.
_MOST_PICKLE_BYTES = 2 * MOST_HEADER_BYTES

_KINDS = ("Double", "Float", "Half", "BFloat16", "Bool", "Long", "Int", "Short", "Char", "Byte")
_DTYPES = dict(zip(_KINDS, DTYPE_NAMES, strict=True))
# The last argument of every tensor: its hooks, of which there are none.
_LAST = "collections OrderedDict"


class PtForm(StateForm):
    """One `.pt` file."""

    suffix = ".pt"

    def write(self, path: Path, document: str, state: State) -> None:
        """Write the file with torch.save, which writes whole storages: each tensor gets its own."""
        content = {
            HEADER_KEY: document,
            "tensors": {name: one.clone() for name, one in sorted(state.tensors.items())},
        }
        try:
            write_state_file(path, lambda file: torch.save(content, file))
        except RuntimeError as error:
            # torch hides the error of the file in its own.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def map(self, path: Path) -> StoredState:
        """Read the arguments in the pickle, and map the tensors."""
        with zipfile.ZipFile(path) as archive:
            members = {one.filename: one for one in archive.infolist()}
            if any(one.compress_type for one in members.values()):
                raise StateCorrupt("a part of it is compressed")
            folder = next(one for one in members if one.endswith("/data.pkl"))[:-8]
            with archive.open(f"{folder}data.pkl") as pickle:
                values = _list_arguments(pickle.read(_MOST_PICKLE_BYTES))
        _, key, document, *rest = values
        if key != HEADER_KEY:
            raise StateCorrupt(f"a file of torch.save but no state: it lacks {HEADER_KEY}")
        nbytes = path.stat().st_size
        file = torch.from_file(str(path), size=nbytes, dtype=torch.uint8)
        tensors = {}
        begin = 1
        while begin < len(rest):
            end = rest.index(_LAST, begin)
            name, _, _, kind, number, _, _, _, *sizes = rest[begin:end]
            member = members[f"{folder}data/{number}"]
            first = member.header_offset + 30
            # A local header of 30 bytes ends in the lengths of the two fields behind it.
            first += int(file[first - 4 : first].numpy().view("<u2").sum())
            dtype = _DTYPES[kind.removeprefix("torch ").removesuffix("Storage")]
            numbers = file[first : first + member.file_size].view(dtype)
            # The sizes of the axes come before their strides.
            tensors[name] = numbers.reshape(sizes[: len(sizes) // 2])
            begin = end + 1
        return StoredState(document, tensors, nbytes)


def _list_arguments(pickle: bytes) -> list[Any]:
    """Return the arguments of the opcodes of a pickle, with those that it repeats by number."""
    values = list[Any]()
    memo = {}
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name.endswith("PUT"):
            memo[argument] = values[-1]
        elif opcode.name.endswith("GET"):
            values.append(memo[argument])
        elif argument is not None:
            values.append(argument)
    return values
