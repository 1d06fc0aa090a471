"""The interface of a storage form, and what the forms in the file system share.

A form chooses where a state is and how its bytes lie there. `Form` is what every form does; `LocalForm` does most of it
for one file or folder: a lock keeps writers apart, and kept commits lie beside the state. `video.safetensors` has its
kept commits beside it as `video.safetensors@000123.000s`; each is a complete state, and `*.safetensors` does not match
it. `protokv.state.forms` chooses the form of a path, `protokv.state.writer` which commits are kept.
"""

from __future__ import annotations

import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound, shown, system_error
from protokv.machine import memory_bytes
from protokv.state.commit import Lock, explain_write_errors, keep_as, recover, replace, retire
from protokv.state.digest import NAMES, check_dtypes, copy_and_digest, digest_tensors
from protokv.state.header import Admit, Header, Shapes, State, explain_read_errors, seal, unseal

S = TypeVar("S")
T = TypeVar("T")

StatePath = str | os.PathLike[str]

# A kept commit has the name of the state with its stream time appended.
KEPT_SUFFIX = re.compile(r"@(\d{6,}\.\d{3})s$")

# Give up on a state that is replaced faster than it can be read.
_ATTEMPTS = 20

# Systems allow names of 255 bytes; kept commits and temporary files append at most 48.
_LONGEST_NAME_BYTES = 255 - 48


class Stored:
    """A state whose header is read and verified. Its tensors are mapped, not read yet.

    Attributes:
        header: of the state.
        shapes: shape and dtype of each tensor.
        nbytes: the stored bytes.
    """

    def __init__(self, document: object, tensors: Mapping[str, Tensor], nbytes: int) -> None:
        """Check everything that needs no byte of a tensor.

        Raises:
            StateCorrupt: document and tensors are no state; the tensor or field is named.
            StateMismatch: a newer version wrote it.
        """
        self.header, self._digests = unseal(document)
        self._tensors, self.nbytes = tensors, nbytes
        if set(self._digests) != set(tensors):
            raise StateCorrupt("digests: expected one for every tensor and no other")
        for name, one in tensors.items():
            if not isinstance(one, Tensor) or one.dtype not in NAMES or one.device.type != "cpu":
                raise StateCorrupt(f"tensor {name}: expected a tensor")
            if not one.is_contiguous():
                raise StateCorrupt(f"tensor {name}: its numbers do not lie in order")
        # Tensors that share bytes could take far more memory than the file.
        if (needed := sum(one.nbytes for one in tensors.values())) > nbytes:
            raise StateCorrupt(f"tensors of {needed} bytes do not fit the file")
        self.shapes: Shapes = {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}

    def read(self, verify: bool, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return copies of the tensors, or of those named; check their digests if `verify`. StateCorrupt."""
        copied = copy_and_digest(self._tensors if names is None else {name: self._tensors[name] for name in names})
        for name, (tensor, digest) in copied.items():
            if verify and digest != self._digests[name]:
                raise StateCorrupt(f"tensor {name}: its bytes are not those that were saved")
            if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
                raise StateCorrupt(f"tensor {name}: a truth value is neither 0 nor 1")
        return {name: tensor for name, (tensor, _) in copied.items()}


class Form(ABC):
    """A state at a path, in one form. As a context manager: the right to write there.

    The path holds the old or the new state whole at any time. Every method raises only `StateError` or a subclass:
    `StateNotFound` if nothing is there, `StateCorrupt` if it is damaged or hostile (naming the tensor or field if
    possible), `StateMismatch` if a newer version wrote it. No method allocates memory because the data claims a size.

    Attributes:
        path: where the state is.
        locked: True if a second writer is refused. True only between `__enter__` and `__exit__`, and False there too on
            a file system without locks.
    """

    locked: bool = False

    def __init__(self, path: StatePath) -> None:
        """Touch nothing yet."""
        self.path = path

    @abstractmethod
    def check_target(self) -> None:
        """Raise StateError if the place is missing or not writable, or holds something other than a state."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Take the right to write, without waiting. StateError as `check_target`; StateLocked if another has it."""

    @abstractmethod
    def __exit__(self, *_: Any) -> None:
        """Give the right back."""

    @abstractmethod
    def replace(self, state: State) -> None:
        """Put a state in place atomically and durably. One thread at a time may call this.

        Raises:
            StateLocked: another writer has committed since this form was entered or last committed.
            StateError: the state cannot be written. In both cases the old state is still there.
        """

    @abstractmethod
    def look(self, at: str | None, read: Callable[[Stored], T]) -> T:
        """Return `read(stored)` of the kept commit `at` or the current state; retry if it was replaced meanwhile."""

    @abstractmethod
    def list_kept(self) -> Iterator[tuple[str, Header]]:
        """Yield the place and header of each kept commit, of any stream. Skip files that only have such a name."""

    @abstractmethod
    def keep(self, header: Header) -> None:
        """Keep the current state, which has this header, as a commit of its own, unless the name is taken."""

    @abstractmethod
    def retire(self, at: str) -> None:
        """Remove a kept commit if possible."""

    def read(self, at: str | None = None, *, verify: bool = True, admit: Admit | None = None) -> State:
        """Read the kept commit `at`, or the current state; see `protokv.state.reader.load_state`."""

        def read(stored: Stored) -> State:
            if admit is not None:
                admit(stored.header, stored.shapes)
            # Sparse files can claim tensors that were never written.
            available = memory_bytes()
            if available is not None and stored.nbytes > available:
                raise StateError(f"the state has {stored.nbytes} bytes, this machine has {available} bytes of memory")
            return State.join(stored.header, stored.read(verify))

        return self.look(at, read)

    def read_header(self, at: str | None = None) -> Header:
        """Read and verify the header alone."""
        return self.look(at, lambda stored: stored.header)

    def stored_bytes(self) -> int:
        """Return the stored bytes of the current state, without kept commits."""
        return self.look(None, lambda stored: stored.nbytes)


class LocalForm(Form):
    """A form in the file system: the document of a state and its tensors, in one file or folder.

    Attributes:
        suffix: of its paths.
        kind: "file" or "folder".
    """

    suffix: ClassVar[str]
    kind: ClassVar[str] = "file"

    @abstractmethod
    def write(self, path: Path, document: str, state: State) -> None:
        """Create and sync the file or folder. The tensors are contiguous and on the CPU; StateError as `replace`."""

    @abstractmethod
    def map(self, path: Path) -> Stored:
        """Map the tensors of the file or folder. Nothing may be allocated because it claims a size.

        An exception of a library means that it is no state.
        """

    @property
    def target(self) -> Path:
        """The path with links resolved, so that a commit replaces the target of a link."""
        return Path(os.path.realpath(self.path))

    def check_target(self) -> None:
        """Raise StateError if a state cannot be put there."""
        with explain_write_errors(self.path):
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

    def replace(self, state: State) -> None:
        """Put the file or folder in place."""
        self.check_target()
        with explain_write_errors(self.path):
            check_dtypes(state.tensors)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
            copied = State.join(state, tensors, state.tensor_info)
            document = seal(copied, digest_tensors(tensors))
            replace(self.target, lambda path: self.write(path, document, copied))

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
                found = read(self.map(target))
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

        with explain_read_errors(path):
            return read_unchanged(path, identify, read_same)

    def list_kept(self) -> Iterator[tuple[str, Header]]:
        """Yield the commits beside the state whose name and header agree, oldest first. Links do not count."""
        target = self.target
        with explain_read_errors(self.path), suppress(FileNotFoundError, NotADirectoryError):
            for one in sorted(target.parent.iterdir()):
                named = KEPT_SUFFIX.search(one.name)
                if named and one.name[: named.start()] == target.name and not one.is_symlink():
                    with suppress(StateNotFound, StateCorrupt, StateMismatch):
                        header = self.read_header(str(one))
                        if format_kept_suffix(header) == named[0]:
                            yield str(one), header

    def keep(self, header: Header) -> None:
        """Give the state a second name."""
        target = self.target
        name = target.with_name(target.name + format_kept_suffix(header))
        if not os.path.lexists(name):
            with explain_write_errors(self.path):
                keep_as(target, name)

    def retire(self, at: str) -> None:
        """Remove a kept commit. If a reader prevents that, the next commit removes it."""
        with suppress(OSError):
            retire(self.target, Path(at))


def format_kept_suffix(header: Header) -> str:
    """Return what the name of a kept commit with this header ends in."""
    return f"@{header.clock.stream_time_s:010.3f}s"


def read_unchanged(path: StatePath, look: Callable[[], S], read: Callable[[S], T]) -> T:
    """Return `read(look())`; retry if it fails and `look` returns something else afterwards."""
    for _ in range(_ATTEMPTS):
        seen = look()
        try:
            return read(seen)
        except Exception:
            if look() == seen:
                raise
    raise StateError(f"{os.fspath(path)} is replaced faster than it can be read", hint="try again")
