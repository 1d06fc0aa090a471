"""What all forms in a file system share: a lock beside the state, and earlier commits under names of their own.

`video.safetensors` has `video.safetensors@000123.000s` and so on beside it, each a complete state that a commit gave a
second name; who collects states by `*.safetensors` does not collect them. Reading begins again when a commit came in
between. A form adds how one state is put in place and read; `FileForm` leaves to it what bytes there are. Knows nothing
of what the tensors mean.
"""

from __future__ import annotations

import os
import stat
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from protokv.errors import StateCorrupt, StateError, shown
from protokv.snapshot.commit import check_place, keep_as, recover, replace, retire, sweep, writing
from protokv.snapshot.digest import copy_and_digest, tensor_digests
from protokv.snapshot.document import NAMES, Admit, admitted, dtype_name, parse_json, reading, seal, unseal
from protokv.snapshot.filesystem import DISK, FileSystem, Sink, write_file
from protokv.snapshot.form import MOMENT, Form, StatePath
from protokv.snapshot.lock import Lock
from protokv.snapshot.schema import Header, State, check_tensor_names
from protokv.snapshot.sources import same_stream

T = TypeVar("T")

# A real header takes some 20 kB.
HEADER_LIMIT_BYTES = 1 << 20

# A writer that commits faster than a state is read does not last.
_ATTEMPTS = 20


class LocalForm(Form):
    """A form in the file system.

    Attributes:
        suffix: what its paths end in.
        kind: what a state is there: a file, or a folder.
        fs: the calls that its commits make.
    """

    suffix: ClassVar[str]
    kind: ClassVar[str] = "file"

    def __init__(self, path: StatePath, fs: FileSystem = DISK) -> None:
        super().__init__(path)
        self.fs = fs

    @property
    def target(self) -> Path:
        """The path itself: a link that the user named is followed, and no other."""
        return Path(os.path.realpath(self.path))

    def check_target(self) -> None:
        """Whether a state could be put there; what a link points to is what is replaced."""
        target = check_place(self.path)
        with writing(self.path):
            recover(target, self.fs)
            there = "nothing" if not target.exists() else "folder" if target.is_dir() else "file"
        if there not in ("nothing", self.kind):
            raise StateError(f"cannot write the state {self.path}: it is a {there}", hint="Choose another name.")

    def __enter__(self) -> Self:
        """Take the lock."""
        self.check_target()
        self._lock = Lock(self.path).__enter__()
        self.locked = self._lock.held
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock back."""
        self.locked = False
        self._lock.__exit__(kind, error, trace)

    def steady(self, path: StatePath, read: Callable[[Path], T]) -> T:
        """What `read` makes of a state in this form that was not replaced meanwhile.

        Raises:
            StateError: as `Form`; also what `read` raises, if that was not because of a commit.
        """
        with reading(path):
            target = Path(os.path.realpath(path))
            for _ in range(_ATTEMPTS):
                recover(target, self.fs)
                before = self._identity(target)
                try:
                    found = read(target)
                except Exception as error:
                    # Whatever a library raises on what is no state.
                    if self._identity(target) != before:
                        continue
                    if isinstance(error, (StateError, PermissionError)):
                        raise
                    raise StateCorrupt(f"it cannot be read as a state ({shown(error)})") from error
                if self._identity(target) == before:
                    return found
        raise StateError(f"{os.fspath(path)} is replaced faster than it can be read", hint="try again")

    def _identity(self, target: Path) -> tuple[int, ...]:
        """What tells one state at a path from the next."""
        found = target.stat()
        kind = {stat.S_IFREG: "file", stat.S_IFDIR: "folder"}.get(stat.S_IFMT(found.st_mode), "pipe or device")
        if kind != self.kind:
            raise StateCorrupt(f"expected a state, which is a {self.kind} here; it is a {kind}")
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def kept(self) -> Iterator[tuple[str, Header]]:
        """Commits beside the state whose name is that of their time, oldest first; no links."""
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
        """Give the state a second name, unless something else than a commit of this stream has it."""
        target = self.target
        name = target.with_name(f"{target.name}@{header.clock.stream_time_s:010.3f}s")
        there = dict(self.kept()).get(str(name))
        if not os.path.lexists(name) or (there is not None and same_stream(there, header)):
            with writing(self.path):
                sweep(target, self.fs)
                keep_as(target, name, self.fs)

    def retire(self, at: str) -> None:
        """Remove a second name. Somebody may be reading it; then the next commit removes it."""
        with suppress(OSError):
            retire(self.target, Path(at), self.fs)
            self.fs.sync_folder(self.target.parent)


class FileForm(LocalForm):
    """A form that is one file: the document with a digest of every tensor, and the tensors."""

    @abstractmethod
    def fill(self, sink: Sink, document: str, tensors: Mapping[str, Tensor]) -> None:
        """Write contiguous CPU tensors, and the document; StateError if that takes a head too long to be read."""

    @abstractmethod
    def map(self, target: Path) -> tuple[object, object]:
        """The document, and the tensors by name as they lie in the file, by the library whose format it is.

        What is in the file may be anything; what is returned is checked by the caller. Nothing may be allocated
        because the file claims a size.
        """

    def replace(self, state: State) -> None:
        """Put the file in place."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
        named = {name: (dtype_name(name, tensor.dtype), tensor) for name, tensor in tensors.items()}
        document = seal(state, HEADER_LIMIT_BYTES, digests=tensor_digests(named, state.format_version))
        with writing(self.path):
            replace(
                self.target,
                lambda temporary: write_file(temporary, lambda sink: self.fill(sink, document, tensors), self.fs),
                self.fs,
            )

    def read(self, at: str | None = None, *, verify: bool = True, admit: Admit | None = None) -> State:
        """Read the file."""

        def read(target: Path) -> State:
            header, digests, mapped = self._checked(target)
            admitted(header, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mapped.items()}, admit)
            named = {name: (NAMES[tensor.dtype], tensor) for name, tensor in mapped.items()}
            tensors = {}
            for name, (tensor, digest) in copy_and_digest(named, header.format_version).items():
                if verify and digest != digests[name]:
                    raise StateCorrupt(f"tensor {name}: its bytes are not those that were saved")
                if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
                    raise StateCorrupt(f"tensor {name}: a truth value is neither 0 nor 1")
                tensors[name] = tensor
            return State.of(header, tensors)

        return self.steady(at or self.path, read)

    def read_header(self, at: str | None = None) -> Header:
        """Read and verify the header alone."""
        return self.steady(at or self.path, lambda target: self._checked(target)[0])

    def stored_bytes(self) -> int:
        """Bytes of the file."""
        return self.steady(self.path, lambda target: target.stat().st_size)

    def _checked(self, target: Path) -> tuple[Header, Mapping[str, str], dict[str, Tensor]]:
        """The header, the digests, and the tensors as they lie in the file, not read yet."""
        document, mapped = self.map(target)
        if not isinstance(document, str) or not isinstance(mapped, dict):
            raise StateCorrupt("there is no state of protokv in this file")
        header, digests = unseal(parse_json(document), "digests")
        if set(digests) != set(mapped):
            raise StateCorrupt("digests: expected one for every tensor and no other")
        check_tensor_names(digests)
        taken = 0
        for name, one in mapped.items():
            if not isinstance(one, Tensor) or one.dtype not in NAMES or one.device.type != "cpu":
                raise StateCorrupt(f"tensor {name}: expected a tensor")
            if not one.is_contiguous():
                raise StateCorrupt(f"tensor {name}: its numbers do not lie in order")
            taken += one.nbytes
        # Or bytes that are named many times would unfold.
        if taken > target.stat().st_size:
            raise StateCorrupt(f"tensors of {taken} bytes do not fit the file")
        return header, digests, mapped
