"""`Form`: a state at a path, in one form. A form says how the bytes of a state lie there, and nothing else.

A new form gives `suffix`, `write` and `map`. The rest is the same for all in the file system: a lock keeps writers
apart, and kept commits lie beside the state. `video.safetensors` has its kept commits beside it as
`video.safetensors@000123.000s`; each is a complete state, and `*.safetensors` does not match it.
`protokv.state.forms` chooses the form of a path, `protokv.state.writer` which commits are kept.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor

from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound
from protokv.state.commit import explain_read_errors, explain_write_errors, lock, recover, replace, retire
from protokv.state.digest import NAMES, digest_tensors
from protokv.state.header import Header, State, seal, unseal

T = TypeVar("T")

StatePath = str | os.PathLike[str]

# A kept commit has the name of the state with its stream time appended.
KEPT_SUFFIX = re.compile(r"@(\d{6,}\.\d{3})s$")


class Stored:
    """A state whose header is read and verified. Its tensors are mapped, not read yet.

    Attributes:
        header: of the state.
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
            if not isinstance(one, Tensor) or one.dtype not in NAMES or not one.is_contiguous():
                raise StateCorrupt(f"tensor {name}: expected a tensor whose numbers lie in order")
        # Tensors that share bytes could take far more memory than the file.
        if (needed := sum(one.nbytes for one in tensors.values())) > nbytes:
            raise StateCorrupt(f"tensors of {needed} bytes do not fit the file")

    def read(self, verify: bool = True, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return copies of the tensors, or of those named; check their digests if `verify`. StateCorrupt."""
        copies = {name: one.clone() for name, one in self._tensors.items() if names is None or name in names}
        for name, digest in digest_tensors(copies).items() if verify else ():
            if digest != self._digests[name]:
                raise StateCorrupt(f"tensor {name}: its bytes are not those that were saved")
        return copies


class Form(ABC):
    """A state at a path, in one form. As a context manager: the right to write there.

    The path holds the old or the new state whole at any time. Every method raises only `StateError` or a subclass:
    `StateNotFound` if nothing is there, `StateCorrupt` if it is damaged or hostile (naming the tensor or field if
    possible), `StateMismatch` if a newer version wrote it.

    Attributes:
        suffix: of its paths.
        kind: "file" or "folder".
        path: where the state is.
        locked: True if a second writer is refused. True only between `__enter__` and `__exit__`, and False there too on
            a file system without locks.
    """

    suffix: ClassVar[str]
    kind: ClassVar[str] = "file"
    locked: bool = False

    def __init__(self, path: StatePath) -> None:
        """Touch nothing yet."""
        self.path = path

    @abstractmethod
    def write(self, path: Path, document: str, state: State) -> None:
        """Create and sync the file or folder. The tensors are contiguous and on the CPU; OSError or StateError."""

    @abstractmethod
    def map(self, path: Path) -> Stored:
        """Map the tensors of the file or folder. An exception of a library means that it is no state."""

    @property
    def target(self) -> Path:
        """The path with links resolved, so that a commit replaces the target of a link."""
        return Path(os.path.realpath(self.path))

    # ---- write ----

    def check_target(self) -> None:
        """Raise StateError if the place is missing or not writable, or holds something other than a state."""
        with explain_write_errors(self.path):
            target, folder, what = self.target, Path(self.path).parent, f"cannot write the state {self.path}"
            if not target.parent.is_dir():
                raise StateError(f"{what}: there is no folder {folder}", hint="create the folder first")
            if not os.access(target.parent, os.W_OK):
                raise StateError(f"{what}: {folder} is read-only", hint="choose a folder that you may write to")
            recover(target)
            if os.path.lexists(target) and not self._has_kind(target):
                raise StateError(f"{what}: it is no {self.kind}", hint="choose another name")

    def _has_kind(self, target: Path) -> bool:
        return target.is_dir() if self.kind == "folder" else target.is_file()

    def __enter__(self) -> Self:
        """Take the right to write, without waiting. StateError as `check_target`; StateLocked if another has it."""
        self.check_target()
        self._lock = lock(self.path)
        self.locked = self._lock.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        """Give the right back."""
        self.locked = False
        self._lock.__exit__(None, None, None)

    def replace(self, state: State, keep: Header | None = None) -> None:
        """Put a state in place atomically and durably. One thread at a time may call this.

        The old one, which has the header `keep`, becomes a kept commit, unless something has its name; None: it goes.

        Raises:
            StateLocked: another writer has committed since this form was entered or last committed.
            StateError: the state cannot be written. In both cases the old state is still there.
        """
        self.check_target()
        for name, tensor in state.tensors.items():
            if tensor.dtype not in NAMES:
                raise StateError(f"tensor {name}: a state cannot hold {tensor.dtype}")
        with explain_write_errors(self.path):
            target = self.target
            kept = None if keep is None else target.with_name(target.name + format_kept_suffix(keep))
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
            document = seal(state, digest_tensors(tensors))
            replace(
                target,
                lambda path: self.write(path, document, changed(state, tensors=tensors)),
                None if kept is None or os.path.lexists(kept) else kept,
            )

    # ---- read ----

    def look(self, at: str | None, read: Callable[[Stored], T]) -> T:
        """Return `read(stored)` of the kept commit `at` or the current state; again if it was replaced meanwhile."""
        path = at or self.path
        target = Path(os.path.realpath(path))

        def identify() -> tuple[int, int]:
            with suppress(OSError):
                recover(target)
            found = target.stat()
            return found.st_ino, found.st_mtime_ns

        def read_once() -> T:
            if not self._has_kind(target):
                raise StateCorrupt(f"expected a state, which is a {self.kind} here")
            return read(self.map(target))

        while True:
            with explain_read_errors(path):
                seen = identify()
                try:
                    found = read_once()
                except Exception:
                    # A folder may have been read in part from the old state, and in part from the new one.
                    if identify() == seen:
                        raise
                    continue
                if identify() == seen:
                    return found

    def read(self, at: str | None = None, *, verify: bool = True) -> State:
        """Read the kept commit `at`, or the current state; see `protokv.state.reader.load_state`."""
        return self.look(at, lambda stored: State.join(stored.header, stored.read(verify)))

    def read_header(self, at: str | None = None) -> Header:
        """Read and verify the header alone."""
        return self.look(at, lambda stored: stored.header)

    def stored_bytes(self) -> int:
        """Return the stored bytes of the current state, without kept commits."""
        return self.look(None, lambda stored: stored.nbytes)

    # ---- kept commits ----

    def list_kept(self) -> Iterator[tuple[str, Header]]:
        """Yield the place and header of each kept commit, of any stream. Skip files that only have such a name."""
        with explain_read_errors(self.path):
            target = self.target
            found = sorted(target.parent.iterdir()) if target.parent.is_dir() else []
            places = [str(one) for one in found if not one.is_symlink()]
        yield from self._read_kept(os.fspath(target), places)

    def _read_kept(self, ours: str, places: Collection[str]) -> Iterator[tuple[str, Header]]:
        """Yield those of the places that are kept commits of the state at `ours`."""
        for at in places:
            if (named := KEPT_SUFFIX.search(at)) and at[: named.start()] == ours:
                with suppress(StateNotFound, StateCorrupt, StateMismatch):
                    header = self.read_header(at)
                    if format_kept_suffix(header) == named[0]:
                        yield at, header

    def retire(self, at: str) -> None:
        """Remove a kept commit. If a reader prevents that, the next commit removes it."""
        with suppress(OSError):
            retire(self.target, Path(at))


def format_kept_suffix(header: Header) -> str:
    """Return what the name of a kept commit with this header ends in."""
    return f"@{header.clock.stream_time_s:010.3f}s"
