"""The forms of a single file, and the base of all forms in the file system: a lock, and kept commits beside the state.

`video.safetensors` has its kept commits beside it as `video.safetensors@000123.000s`; each is a complete state, and
`*.safetensors` does not match it. `LocalForm` handles names, locks and reading; `FileForm` is the base of both forms.

A `.pt` file holds `{"protokv": document, "tensors": {name: tensor}}`, written by torch.save: a zip archive with a
pickle in it, and a pickle can run code. `torch.load(weights_only=True, mmap=True)` runs none and maps every tensor, so
no tensor is larger than the file. What could still make torch.load allocate memory is refused first: compressed
members, a long pickle, and a pickle that names more than tensors need.
"""

from __future__ import annotations

import os
import pickletools
import re
import stat
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound, shown, system_error
from protokv.state.commit import Lock, keep_as, recover, replace, retire, write_file, writing
from protokv.state.digest import NAMES, check_dtypes, copy_and_digest, tensor_digests
from protokv.state.form import MOMENT, Form, Stored, read_unchanged
from protokv.state.snapshot import (
    HEADER_LIMIT_BYTES,
    KEY,
    Found,
    Header,
    State,
    check_length,
    check_tensor_names,
    map_safetensors,
    parse_state_json,
    reading,
    seal,
    unseal,
    write_safetensors,
)

T = TypeVar("T")

# Systems allow names of 255 bytes; kept commits and temporary files append at most 48.
_LONGEST_NAME_BYTES = 255 - 48

# A .pt file with more members is no state.
_MOST_MEMBERS = 4096

# The only names in the pickle of a state. weights_only allows more, such as a bytearray of any size and tensors that
# are not in the file.
_GLOBALS = re.compile(
    "torch (Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage"
    r"|torch\._utils _rebuild_tensor_v2|collections OrderedDict"
)


class LocalForm(Form):
    """A form in the file system.

    Attributes:
        suffix: of its paths.
        kind: "file" or "folder".
    """

    suffix: ClassVar[str]
    kind: ClassVar[str] = "file"

    @abstractmethod
    def open(self, target: Path) -> Stored:
        """Open the state at a path. Exceptions of a library mean that it is no state."""

    @property
    def target(self) -> Path:
        """The path with links resolved, so that a commit replaces the target of a link."""
        return Path(os.path.realpath(self.path))

    def check_target(self) -> None:
        """Raise StateError if a state cannot be put there."""
        with writing(self.path):
            target, folder, what = self.target, Path(self.path).parent, f"cannot write the state {self.path}"
            if not target.parent.is_dir():
                raise StateError(f"{what}: there is no folder {folder}", hint="create the folder first")
            if not os.access(target.parent, os.W_OK):
                raise StateError(f"{what}: {folder} is read-only", hint="choose a folder that you may write to")
            if len(os.fsencode(target.name)) > _LONGEST_NAME_BYTES:
                why = f"its name takes more than {_LONGEST_NAME_BYTES} bytes"
                raise StateError(f"{what}: {why}", hint="choose a shorter name")
            recover(target)
            there = "nothing" if not target.exists() else "folder" if target.is_dir() else "file"
            if there not in ("nothing", self.kind):
                raise StateError(f"{what}: it is a {there}", hint="choose another name")

    def __enter__(self) -> Self:
        """Take the lock."""
        self.check_target()
        self._lock = Lock(self.path).__enter__()
        self.locked = self._lock.held
        return self

    def __exit__(self, *_: Any) -> None:
        """Release the lock."""
        self.locked = False
        self._lock.__exit__()

    def look(self, at: str | None, read: Callable[[Stored], T]) -> T:
        """Read the file or folder `at`, or the current state."""
        path = at or self.path
        target = Path(os.path.realpath(path))

        def identify() -> tuple[int, ...]:
            """Return numbers that differ between one state at this path and the next."""
            recover(target)
            found = target.stat()
            kind = {stat.S_IFREG: "file", stat.S_IFDIR: "folder"}.get(stat.S_IFMT(found.st_mode), "pipe or device")
            if kind != self.kind:
                raise StateCorrupt(f"expected a state, which is a {self.kind} here; it is a {kind}")
            return found.st_dev, found.st_ino, found.st_mtime_ns

        def read_same(seen: tuple[int, ...]) -> T:
            try:
                found = read(self.open(target))
            except StateError:
                raise
            except Exception as error:
                # A disk that cannot be read, or too little memory, is no damage of the state.
                if (why := system_error(error)) is not None:
                    raise why from error
                raise StateCorrupt(f"it cannot be read as a state ({shown(error)})") from error
            if identify() != seen:
                raise StateError("it was replaced meanwhile")
            return found

        with reading(path):
            return read_unchanged(path, identify, read_same)

    def kept(self) -> Iterator[tuple[str, Header]]:
        """Yield the commits beside the state whose name and header agree, oldest first. Links do not count."""
        target = self.target
        with reading(self.path), suppress(FileNotFoundError, NotADirectoryError):
            for one in sorted(target.parent.iterdir()):
                named = MOMENT.search(one.name)
                if named and one.name[: named.start()] == target.name and not one.is_symlink():
                    with suppress(StateNotFound, StateCorrupt, StateMismatch):
                        header = self.read_header(str(one))
                        if f"{header.clock.stream_time_s:010.3f}" == named[1]:
                            yield str(one), header

    def keep(self, header: Header) -> None:
        """Give the state a second name."""
        target = self.target
        name = target.with_name(f"{target.name}@{header.clock.stream_time_s:010.3f}s")
        if not os.path.lexists(name):
            with writing(self.path):
                keep_as(target, name)

    def retire(self, at: str) -> None:
        """Remove a kept commit. If a reader prevents that, the next commit removes it."""
        with suppress(OSError):
            retire(self.target, Path(at))


class FileForm(LocalForm):
    """A form that is one file: the document, with a digest of every tensor, and the tensors."""

    @abstractmethod
    def fill(self, file: BinaryIO, document: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the document and contiguous CPU tensors. StateError if the header would be too long to read."""

    @abstractmethod
    def map(self, source: Path) -> tuple[object, object]:
        """Return the document and the tensors by name, as the format's library reads them; those of a file are mapped.

        The caller checks both. Nothing may be allocated because the file claims a size.
        """

    def replace(self, state: State) -> None:
        """Put the file in place."""
        with writing(self.path):
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
            check_dtypes(tensors)
            document = seal(state, HEADER_LIMIT_BYTES, tensor_digests(tensors))
            replace(self.target, lambda path: write_file(path, lambda file: self.fill(file, document, tensors)))

    def open(self, target: Path) -> Stored:
        """Map the file."""
        return _File(*self.map(target), target.stat().st_size)


class _File(Stored):
    def __init__(self, document: object, mapped: object, size: int) -> None:
        if not isinstance(document, str) or not isinstance(mapped, dict):
            raise StateCorrupt("there is no state of protokv in this file")
        self.header, self.digests = unseal(parse_state_json(document))
        self._mapped, self._size = mapped, size
        if set(self.digests) != set(mapped):
            raise StateCorrupt("digests: expected one for every tensor and no other")
        check_tensor_names(self.digests)
        for name, one in mapped.items():
            if not isinstance(one, Tensor) or one.dtype not in NAMES or one.device.type != "cpu":
                raise StateCorrupt(f"tensor {name}: expected a tensor")
            if not one.is_contiguous():
                raise StateCorrupt(f"tensor {name}: its numbers do not lie in order")
        # Tensors that share bytes could take far more memory than the file.
        if (taken := sum(one.nbytes for one in mapped.values())) > size:
            raise StateCorrupt(f"tensors of {taken} bytes do not fit the file")

    @property
    def found(self) -> Found:
        return {name: (tuple(one.shape), one.dtype) for name, one in self._mapped.items()}

    def tensors(self, verify: bool, names: Collection[str] | None = None) -> dict[str, Tensor]:
        wanted = self._mapped if names is None else {name: self._mapped[name] for name in names}
        copied = copy_and_digest(wanted)
        for name, (_, digest) in copied.items():
            if verify and digest != self.digests[name]:
                raise StateCorrupt(f"tensor {name}: its bytes are not those that were saved")
        return {name: tensor for name, (tensor, _) in copied.items()}

    def nbytes(self) -> int:
        return self._size


class SafetensorsForm(FileForm):
    """One `.safetensors` file; `protokv.state.snapshot` has its layout."""

    suffix = ".safetensors"

    def fill(self, file: BinaryIO, document: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the document and the tensors."""
        write_safetensors(file, document, tensors)

    def map(self, source: Path) -> tuple[object, object]:
        """Return the document and the tensors."""
        return map_safetensors(source)


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

    def map(self, source: Path) -> tuple[object, object]:
        """Read the pickle and the tensors."""
        try:
            _check_pickle(source)
        except (zipfile.BadZipFile, ValueError, LookupError, NotImplementedError) as error:
            raise StateCorrupt(f"not a file that torch.save wrote of a state ({shown(error)})") from error
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict) or set(content) != {KEY, "tensors"}:
            raise StateCorrupt(f"a file of torch.save but no state: it lacks the field {KEY}")
        return content[KEY], content["tensors"]


def _check_pickle(file: Path) -> None:
    """Raise ValueError if the file could make torch.load allocate memory."""
    with zipfile.ZipFile(file) as archive:
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
