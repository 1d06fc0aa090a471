"""A state as one `.pt` file: `{"protokv": document, "tensors": {name: tensor}}`, written by torch.save.

A file of torch.save is a zip file with a pickle in it, and a pickle is a program. It is read by
`torch.load(weights_only=True, mmap=True)` and nothing else: that runs no code, and takes every tensor from where it
lies in the file, so that none can be larger than the file. What could still make it allocate on a claim is refused
before: compressed members, a long pickle, and instructions and names that no pickle of tensors has.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from protokv.errors import StateError
from protokv.snapshot.commit import replace_file
from protokv.snapshot.digest import copy_and_digest, tensor_digests
from protokv.snapshot.document import (
    NAMES,
    as_tensors,
    check_names,
    corrupt,
    dtype_name,
    is_still,
    open_state,
    parse_json,
    seal,
    unseal,
)
from protokv.snapshot.filesystem import FileSystem
from protokv.snapshot.formats.base import StatePath
from protokv.snapshot.formats.local import FileForm
from protokv.snapshot.schema import Header, State
from protokv.snapshot.text import shown

KEY = "protokv"

# A real one takes some 20 kB.
_PICKLE_LIMIT_BYTES = 1 << 20
_MOST_MEMBERS = 4096
_ATTEMPTS = 20

# What torch.save writes for a dictionary of text and tensors.
_INSTRUCTIONS = re.compile(
    "PROTO|EMPTY_DICT|EMPTY_TUPLE|NEWFALSE|BINUNICODE|BININT[12]?|LONG1|(LONG_)?BIN(PUT|GET)|MARK|TUPLE[123]?|GLOBAL"
    "|BINPERSID|REDUCE|SETITEMS?|STOP"
)
_GLOBALS = re.compile(
    "torch (Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage"
    r"|torch\._utils _rebuild_tensor_v2|collections OrderedDict"
)
_UNREADABLE = (RuntimeError, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, OSError)


class PtForm(FileForm):
    """One `.pt` file."""

    suffix = ".pt"

    def replace(self, state: State, path: StatePath) -> None:
        """Put the file in place."""
        tensors = _apart(state.tensors)
        named = {name: (dtype_name(name, tensor.dtype), tensor) for name, tensor in tensors.items()}
        document = seal(state, digests=tensor_digests(named, state.format_version))
        # Names stand in both; the rest of a tensor takes some 150 bytes.
        takes = 2 * len(document) + 400 * len(tensors)
        if takes > _PICKLE_LIMIT_BYTES:
            raise StateError(f"the header of the state takes {takes} bytes, at most {_PICKLE_LIMIT_BYTES} are allowed")

        def write(temporary: Path) -> int:
            with self.fs.create(temporary) as file:
                out = _Sink(file, self.fs)
                try:
                    torch.save({KEY: document, "tensors": tensors}, out)  # type: ignore[arg-type]
                except RuntimeError as error:
                    # torch tells how it stumbled over the file's own error, not that one.
                    raise out.failed or error from None
                self.fs.sync(file)
                return out.written

        replace_file(path, write, self.fs)

    def read(self, path: StatePath, *, verify: bool = True) -> State:
        """Read the file."""
        header, digests, mapped = _mapped(path)
        found = copy_and_digest(
            {name: (NAMES[tensor.dtype], tensor) for name, tensor in mapped.items()}, header.format_version
        )
        return State.of(header, as_tensors(found, digests if verify else None, path))

    def read_header(self, path: StatePath) -> Header:
        """Read and verify the header alone."""
        return _mapped(path)[0]


def _mapped(path: StatePath) -> tuple[Header, Mapping[str, str], dict[str, Tensor]]:
    """The header, the digests, and the tensors as they lie in the file, not read yet."""
    for _ in range(_ATTEMPTS):
        with open_state(path) as file:
            _check_program(file, path)
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except _UNREADABLE as error:
                if not is_still(file, path):
                    continue
                raise corrupt(path, f"torch cannot read it ({shown(error)})") from error
            # torch opens the path once more, and it may have been replaced since.
            if is_still(file, path):
                return _checked(content, os.fstat(file.fileno()).st_size, path)
    raise StateError(f"{os.fspath(path)} is replaced faster than it can be read", hint="try again")


def _checked(content: Any, size: int, path: StatePath) -> tuple[Header, Mapping[str, str], dict[str, Tensor]]:
    if not isinstance(content, dict) or set(content) != {KEY, "tensors"} or not isinstance(content[KEY], str):
        raise corrupt(path, f"a file of torch.save but no state: it lacks the field {KEY}")
    header, parts = unseal(parse_json(content[KEY].encode("utf-8", "surrogatepass"), path), {"digests"}, path)
    tensors = content["tensors"]
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise corrupt(path, "tensors: expected them by name")
    digests = check_names(set(tensors), parts["digests"], path)
    taken = 0
    for name, tensor in tensors.items():
        where = f"tensor {shown(name)}"
        if not isinstance(tensor, Tensor) or tensor.dtype not in NAMES or tensor.device.type != "cpu":
            raise corrupt(path, f"{where}: expected a tensor")
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            raise corrupt(path, f"{where}: it is not all of its storage")
        taken += tensor.nbytes
    # Otherwise a storage that is named many times would unfold.
    if taken > size:
        raise corrupt(path, f"tensors of {taken} bytes do not fit a file of {size}")
    return header, digests, tensors


def _check_program(file: BinaryIO, path: StatePath) -> None:
    """Refuse what torch.load could be made to allocate by, before it sees the file."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > _MOST_MEMBERS or any(one.compress_type or one.flag_bits & 1 for one in members):
                raise ValueError("a member is compressed or encrypted")
            programs = [one for one in members if one.filename.rpartition("/")[2] == "data.pkl"]
            if len(programs) != 1 or programs[0].file_size > _PICKLE_LIMIT_BYTES:
                raise ValueError("it has not one short pickle")
            program = archive.read(programs[0])
        for code, argument, _ in pickletools.genops(program):
            if not _INSTRUCTIONS.fullmatch(code.name):
                raise ValueError(f"its pickle uses {code.name}")
            if code.name == "GLOBAL" and not _GLOBALS.fullmatch(str(argument)):
                raise ValueError(f"its pickle refers to {argument}")
    except (zipfile.BadZipFile, ValueError, EOFError, LookupError, NotImplementedError, OSError) as error:
        raise corrupt(path, f"not a file that torch.save wrote of a state ({shown(error)})") from error


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, each with a storage of its own and of its size: torch.save writes whole storages, once."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in sorted(tensors.items()):
        one = tensor.detach().cpu().contiguous()
        storage = one.untyped_storage()
        if storage.nbytes() != one.nbytes or storage.data_ptr() in taken:
            one = one.clone(memory_format=torch.contiguous_format)
        taken |= {one.untyped_storage().data_ptr()} - {0}
        apart[name] = one
    return apart


class _Sink:
    """What torch.save writes to: a file whose bytes are counted, and whose error is kept."""

    def __init__(self, file: BinaryIO, fs: FileSystem) -> None:
        self._file, self._fs, self.written = file, fs, 0
        self.failed: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append."""
        try:
            self._fs.write(self._file, data)
        except OSError as error:
            self.failed = error
            raise
        self.written += len(data)
        return len(data)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._file.flush()
