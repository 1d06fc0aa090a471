"""The base of all forms in the file system: a lock beside the state, and kept commits under names of their own.

`video.safetensors` has its kept commits beside it as `video.safetensors@000123.000s`; each is a complete state, and
`*.safetensors` does not match it. `LocalForm` handles names, locks and reading; `FileForm` adds what all forms of a
single file share. Subclasses write and read the bytes.
"""

from __future__ import annotations

import os
import stat
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self, TypeVar

from torch import Tensor

from protokv.core.digest import NAMES, check_dtypes, copy_and_digest, tensor_digests
from protokv.core.snapshot import (
    HEADER_LIMIT_BYTES,
    Found,
    Header,
    State,
    check_tensor_names,
    parse_state_json,
    reading,
    seal,
    unseal,
)
from protokv.errors import StateCorrupt, StateError, shown
from protokv.storage.commit import keep_as, recover, replace, retire, writing
from protokv.storage.filesystem import write_file
from protokv.storage.form import MOMENT, Form, Stored, read_unchanged
from protokv.storage.lock import Lock

T = TypeVar("T")

# Systems allow names of 255 bytes; kept commits and temporary files append at most 48.
_LONGEST_NAME_BYTES = 255 - 48


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
        """The path with links resolved, so that a commit replaces what a link points to."""
        return Path(os.path.realpath(self.path))

    def check_target(self) -> None:
        """Raise StateError if a state cannot be put there."""
        with writing(self.path):
            target, what = self.target, f"cannot write the state {self.path}"
            if not target.parent.is_dir():
                raise StateError(f"{what}: there is no folder {Path(self.path).parent}", hint="Make it first.")
            if not os.access(target.parent, os.W_OK):
                raise StateError(f"{what}: {Path(self.path).parent} is read-only", hint="Choose another folder.")
            if len(os.fsencode(target.name)) > _LONGEST_NAME_BYTES:
                why = f"its name takes more than {_LONGEST_NAME_BYTES} bytes"
                raise StateError(f"{what}: {why}", hint="choose a shorter name")
            recover(target)
            there = "nothing" if not target.exists() else "folder" if target.is_dir() else "file"
            if there not in ("nothing", self.kind):
                raise StateError(f"{what}: it is a {there}", hint="Choose another name.")

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
            """Return what differs between one state at this path and the next."""
            recover(target)
            found = target.stat()
            kind = {stat.S_IFREG: "file", stat.S_IFDIR: "folder"}.get(stat.S_IFMT(found.st_mode), "pipe or device")
            if kind != self.kind:
                raise StateCorrupt(f"expected a state, which is a {self.kind} here; it is a {kind}")
            return found.st_dev, found.st_ino, found.st_mtime_ns

        def read_whole(seen: tuple[int, ...]) -> T:
            try:
                found = read(self.open(target))
            except (StateError, PermissionError):
                raise
            except Exception as error:
                raise StateCorrupt(f"it cannot be read as a state ({shown(error)})") from error
            if identify() != seen:
                raise StateError("it was replaced meanwhile")
            return found

        with reading(path):
            return read_unchanged(path, identify, read_whole)

    def kept(self) -> Iterator[tuple[str, Header]]:
        """Yield the commits beside the state whose name and header agree, oldest first. Links do not count."""
        target = self.target
        with suppress(FileNotFoundError, NotADirectoryError):
            for one in sorted(target.parent.iterdir()):
                named = MOMENT.search(one.name)
                if named and one.name[: named.start()] == target.name and not one.is_symlink():
                    with suppress(StateError):
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
    def map(self, target: Path) -> tuple[object, object]:
        """Return the document and the memory-mapped tensors by name, as the format's library reads them.

        The caller checks both. Nothing may be allocated because the file claims a size.
        """

    def replace(self, state: State) -> None:
        """Put the file in place."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
        check_dtypes(tensors)
        document = seal(state, HEADER_LIMIT_BYTES, tensor_digests(tensors))
        with writing(self.path):
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

    def tensors(self, verify: bool) -> dict[str, Tensor]:
        copied = copy_and_digest(self._mapped)
        for name, (_, digest) in copied.items():
            if verify and digest != self.digests[name]:
                raise StateCorrupt(f"tensor {name}: its bytes are not those that were saved")
        return {name: tensor for name, (tensor, _) in copied.items()}

    def nbytes(self) -> int:
        return self._size
