"""A state as one `.pt` file: `{"protokv": document, "tensors": {name: tensor}}`, for `torch.load(weights_only=True)`.

It is a zip archive with a pickle in it, and a pickle can run code. `torch.load(weights_only=True, mmap=True)` runs none
and maps every tensor, so no tensor is larger than the file. What could still make it allocate memory is refused first:
compressed members, a long pickle, and a pickle that names more than tensors need.
"""

from __future__ import annotations

import errno
import pickletools
import re
import zipfile
from pathlib import Path

import torch

from protokv.errors import StateCorrupt, shown
from protokv.state.commit import write_file
from protokv.state.form import LocalForm, Stored
from protokv.state.header import HEADER_LIMIT_BYTES, KEY, State, check_length

_MOST_MEMBERS = 4096

# weights_only allows more names, such as a bytearray of any size and tensors that are not in the file.
_GLOBALS = re.compile(
    "torch (Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage"
    r"|torch\._utils _rebuild_tensor_v2|collections OrderedDict"
)


class PtForm(LocalForm):
    """One `.pt` file."""

    suffix = ".pt"

    def write(self, path: Path, document: str, state: State) -> None:
        """Write the file with torch.save, which writes whole storages: each tensor gets its own."""
        # The document and the pickle both hold the names; the pickle takes 150 bytes more for each tensor.
        check_length(2 * len(document) + 400 * len(state.tensors))
        content = {KEY: document, "tensors": {name: one.clone() for name, one in sorted(state.tensors.items())}}
        try:
            write_file(path, lambda file: torch.save(content, file))
        except RuntimeError as error:
            # torch hides the error of the file in its own.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def map(self, path: Path) -> Stored:
        """Check the pickle, and map the tensors."""
        try:
            _check_pickle(path)
        except (zipfile.BadZipFile, ValueError, LookupError, NotImplementedError, OSError) as error:
            # A place before the beginning of the file is one that a damaged archive names.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise StateCorrupt(f"not a file that torch.save wrote of a state ({shown(error)})") from error
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict) or set(content) != {KEY, "tensors"} or type(content["tensors"]) is not dict:
            raise StateCorrupt(f"a file of torch.save but no state: it lacks the field {KEY}")
        return Stored(content[KEY], content["tensors"], path.stat().st_size)


def _check_pickle(path: Path) -> None:
    """Raise ValueError if the file could make torch.load allocate memory."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > _MOST_MEMBERS or any(one.compress_type or one.flag_bits & 1 for one in members):
            raise ValueError("a member is compressed or encrypted")
        pickles = [one for one in members if one.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or pickles[0].file_size > HEADER_LIMIT_BYTES:
            raise ValueError("it has not one short pickle")
        for code, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if "GLOBAL" in code.name and not _GLOBALS.fullmatch(str(argument)):
                raise ValueError(f"its pickle refers to {argument}")
