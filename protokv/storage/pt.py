"""A state as one `.pt` file: `{"protokv": document, "tensors": {name: tensor}}`, written by torch.save.

A file of torch.save is a zip archive with a pickle in it, and a pickle can run code. `torch.load(weights_only=True,
mmap=True)` runs none and maps every tensor, so no tensor is larger than the file. What could still make torch.load
allocate memory is refused first: compressed members, a long pickle, and a pickle that names more than tensors need.
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

from protokv.core.snapshot import HEADER_LIMIT_BYTES, KEY, check_length
from protokv.errors import StateCorrupt, shown
from protokv.storage.files import FileForm

_MOST_MEMBERS = 4096

# weights_only allows more, such as a bytearray of any size and tensors that are not in the file.
_GLOBALS = re.compile(
    "torch (Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage"
    r"|torch\._utils _rebuild_tensor_v2|collections OrderedDict"
)


class PtForm(FileForm):
    """One `.pt` file."""

    suffix = ".pt"

    def fill(self, file: BinaryIO, document: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the file with torch.save."""
        # The document and the pickle both hold the names; the pickle takes 150 bytes more for each tensor.
        check_length(2 * len(document) + 400 * len(tensors), HEADER_LIMIT_BYTES)
        try:
            torch.save({KEY: document, "tensors": _separate(tensors)}, file)
        except RuntimeError as error:
            # torch hides the error of the file behind its own.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def map(self, target: Path) -> tuple[object, object]:
        """Read the pickle and map the tensors."""
        try:
            _check_pickle(target)
        except (zipfile.BadZipFile, ValueError, LookupError, NotImplementedError) as error:
            raise StateCorrupt(f"not a file that torch.save wrote of a state ({shown(error)})") from error
        content = torch.load(target, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict) or set(content) != {KEY, "tensors"}:
            raise StateCorrupt(f"a file of torch.save but no state: it lacks the field {KEY}")
        return content[KEY], content["tensors"]


def _check_pickle(target: Path) -> None:
    """Raise ValueError if the file could make torch.load allocate memory."""
    with zipfile.ZipFile(target) as archive:
        members = archive.infolist()
        if len(members) > _MOST_MEMBERS or any(one.compress_type or one.flag_bits & 1 for one in members):
            raise ValueError("a member is compressed or encrypted")
        pickles = [one for one in members if one.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or pickles[0].file_size > HEADER_LIMIT_BYTES:
            raise ValueError("it has not one short pickle")
        for code, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if "GLOBAL" in code.name and not _GLOBALS.fullmatch(str(argument)):
                raise ValueError(f"its pickle refers to {argument}")


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor a storage of its own size: torch.save writes whole storages, and shared ones once."""
    separate: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, one in sorted(tensors.items()):
        memory = one.untyped_storage()
        if memory.nbytes() != one.nbytes or memory.data_ptr() in taken:
            one = one.clone(memory_format=torch.contiguous_format)
        taken |= {one.untyped_storage().data_ptr()} - {0}
        separate[name] = one
    return separate
