"""A state as one `.pt` file: `{"protokv": document, "tensors": {name: tensor}}`, written by torch.save.

A file of torch.save is a zip file with a pickle in it, and a pickle is a program. It is read by
`torch.load(weights_only=True, mmap=True)` and nothing else: that runs no code, and takes every tensor from where it
lies in the file, so that none can be larger than the file. What could still make it allocate on a claim is refused
before: compressed members, a long pickle, and a pickle that names more than tensors need.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from protokv.core.snapshot import KEY, check_length
from protokv.errors import StateCorrupt, shown
from protokv.storage.files import HEADER_LIMIT_BYTES, FileForm

_MOST_MEMBERS = 4096

# What weights_only allows besides can allocate: a bytearray of any size, tensors that are not in the file.
_GLOBALS = re.compile(
    "torch (Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage"
    r"|torch\._utils _rebuild_tensor_v2|collections OrderedDict"
)


class PtForm(FileForm):
    """One `.pt` file."""

    suffix = ".pt"

    def fill(self, file: BinaryIO, document: str, tensors: Mapping[str, Tensor]) -> None:
        """What torch.save makes of both."""
        # Names stand in both; the rest of a tensor takes some 150 bytes.
        check_length(2 * len(document) + 400 * len(tensors), HEADER_LIMIT_BYTES)
        try:
            torch.save({KEY: document, "tensors": _apart(tensors)}, file)
        except RuntimeError as error:
            # How torch stumbled over the error of the file.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def map(self, target: Path) -> tuple[object, object]:
        """Nothing is read but the pickle."""
        try:
            _check_program(target)
        except (zipfile.BadZipFile, ValueError, LookupError, NotImplementedError) as error:
            raise StateCorrupt(f"not a file that torch.save wrote of a state ({shown(error)})") from error
        content = torch.load(target, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict) or set(content) != {KEY, "tensors"}:
            raise StateCorrupt(f"a file of torch.save but no state: it lacks the field {KEY}")
        return content[KEY], content["tensors"]


def _check_program(target: Path) -> None:
    """ValueError for what torch.load could be made to allocate by."""
    with zipfile.ZipFile(target) as archive:
        members = archive.infolist()
        if len(members) > _MOST_MEMBERS or any(one.compress_type or one.flag_bits & 1 for one in members):
            raise ValueError("a member is compressed or encrypted")
        programs = [one for one in members if one.filename.rpartition("/")[2] == "data.pkl"]
        if len(programs) != 1 or programs[0].file_size > HEADER_LIMIT_BYTES:
            raise ValueError("it has not one short pickle")
        for code, argument, _ in pickletools.genops(archive.read(programs[0])):
            if "GLOBAL" in code.name and not _GLOBALS.fullmatch(str(argument)):
                raise ValueError(f"its pickle refers to {argument}")


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each with a storage of its own and of its size: torch.save writes whole storages, once."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, one in sorted(tensors.items()):
        storage = one.untyped_storage()
        if storage.nbytes() != one.nbytes or storage.data_ptr() in taken:
            one = one.clone(memory_format=torch.contiguous_format)
        taken |= {one.untyped_storage().data_ptr()} - {0}
        apart[name] = one
    return apart
