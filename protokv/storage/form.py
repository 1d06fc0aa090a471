"""What a form of a state must be able to do at one path, wherever that is.

A form is chosen by the path: by its suffix in the file system, by its scheme elsewhere. The module of a form is
imported when it is first asked for, because some need more than the others. How writers are kept apart is the form's
own affair: files have a lock beside them (`formats.local`), a repository of an object store has transactions. Which
commits are kept, and what answers for a time, is not: that is for `api`. Knows nothing of models and memories.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from protokv.core.snapshot import Admit, Found, Header, State
from protokv.errors import StateCorrupt, StateError, UnknownForm
from protokv.machine import memory_bytes

S = TypeVar("S")
T = TypeVar("T")

StatePath = str | os.PathLike[str]

# Where each class is.
FORMS = {
    ".safetensors": "protokv.storage.safetensors:SafetensorsForm",
    ".zarr": "protokv.storage.zarr:ZarrForm",
    ".pt": "protokv.storage.pt:PtForm",
}
DEFAULT_SUFFIX = ".safetensors"
OBJECT_STORE = "protokv.storage.icechunk:IcechunkForm"

# What the name of a commit that is kept ends in: its stream time.
MOMENT = re.compile(r"@(\d{6,}\.\d{3})s$")
_URL = re.compile(r"[a-z][a-z0-9+.-]+://")

# A writer that commits faster than a state is read does not last.
_ATTEMPTS = 20


class Stored(ABC):
    """A state as it lies in its form: its header and digests are read and verified, its tensors not yet.

    Attributes:
        header: of the state.
        digests: of everything else, by the names that the form has for it.
    """

    header: Header
    digests: Mapping[str, str]

    @property
    @abstractmethod
    def found(self) -> Found:
        """Shape and dtype of the tensors; StateCorrupt if they cannot lie there."""

    @abstractmethod
    def tensors(self, verify: bool) -> Mapping[str, Tensor]:
        """Those of `found`, contiguous and on the CPU, in memory of their own; with their digests verified or not."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes where it is kept."""


class Form(ABC):
    """A state at a path, in one form; as a context manager, the right to write there.

    The path holds the old or the new state whole at any time. Every method raises `StateError` or one of its kinds and
    nothing else for whatever is at the path, be it missing (`StateNotFound`), damaged or hostile (`StateCorrupt`,
    naming the tensor or field where it can), newer than this version reads (`StateMismatch`), or out of reach. Nothing
    is allocated because the data claims a size.

    Attributes:
        path: where the state is.
        locked: whether a second writer is refused. True only between `__enter__` and `__exit__`, and False there too
            where nothing can keep others out.
    """

    locked: bool = False

    def __init__(self, path: StatePath) -> None:
        """Nothing is touched yet."""
        self.path = path

    @abstractmethod
    def check_target(self) -> None:
        """StateError if the place is missing, may not be written to, or holds something that is no state."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Take the right to write, without waiting. StateError as `check_target`; StateLocked if another writes it."""

    @abstractmethod
    def __exit__(self, *_: Any) -> None:
        """Give it back."""

    @abstractmethod
    def replace(self, state: State) -> None:
        """Put a state in place in one act; it is durable when this returns. Called by one thread at a time.

        Raises:
            StateLocked: somebody else has committed since this was entered (or since its own last commit).
            StateError: It cannot be written. In both cases what was there before still is.
        """

    @abstractmethod
    def look(self, at: str | None, read: Callable[[Stored], T]) -> T:
        """What `read` makes of one of `kept`, or of what is current, that was not replaced meanwhile."""

    @abstractmethod
    def kept(self) -> Iterator[tuple[str, Header]]:
        """The kept commits, of whatever stream: where each is, and its header. What only has such a name is none."""

    @abstractmethod
    def keep(self, header: Header) -> None:
        """Let what is current, whose header this is, be a kept commit as well, unless its name is taken. StateError."""

    @abstractmethod
    def retire(self, at: str) -> None:
        """Remove a kept commit. What cannot be removed stays, without an error."""

    def read(self, at: str | None = None, *, verify: bool = True, admit: Admit | None = None) -> State:
        """Read one of `kept`, or where None what is current; all else is as `api.load` has it."""

        def read(stored: Stored) -> State:
            found, there = stored.found, memory_bytes()
            if admit is not None:
                admit(stored.header, found)
            # Files may have holes: what a state says it holds need not have been received.
            takes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in found.values())
            if there is not None and takes > there:
                raise StateError(f"the state holds {takes} bytes of tensors, this machine has {there} bytes of memory")
            tensors = stored.tensors(verify)
            for name, tensor in tensors.items():
                if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
                    raise StateCorrupt(f"tensor {name}: a truth value is neither 0 nor 1")
            return State.of(stored.header, tensors)

        return self.look(at, read)

    def read_header(self, at: str | None = None) -> Header:
        """Read and verify the header alone."""
        return self.look(at, lambda stored: stored.header)

    def stored_bytes(self) -> int:
        """Bytes that the current commit takes where it is kept; kept commits are not counted."""
        return self.look(None, lambda stored: stored.nbytes())


def settled(path: StatePath, look: Callable[[], S], read: Callable[[S], T]) -> T:
    """What `read` makes of what `look` sees, again where that fails and `look` sees something else by then."""
    for _ in range(_ATTEMPTS):
        seen = look()
        try:
            return read(seen)
        except Exception:
            if look() == seen:
                raise
    raise StateError(f"{os.fspath(path)} is replaced faster than it can be read", hint="try again")


def is_url(path: StatePath) -> bool:
    """Whether a path names a place that is not in the file system."""
    return isinstance(path, str) and _URL.match(path) is not None


def form_of(path: StatePath, *, to_read: bool = False) -> Form:
    """The form of a state at this path. StateError if its suffix names none, or what the form needs is not installed.

    What is to be read under another suffix has the default form, which says what it is if it is no state.
    """
    suffix = suffix_of(path) or (DEFAULT_SUFFIX if to_read else "")
    if not suffix and not is_url(path):
        known = ", ".join(sorted(FORMS))
        raise UnknownForm(f"expected a path that ends in one of {known}, got {path}", hint="choose another name")
    module, _, name = (OBJECT_STORE if is_url(path) else FORMS[suffix]).partition(":")
    try:
        made: Form = getattr(import_module(module), name)(path)
    except ImportError as error:
        raise StateError(
            f"{path} is in an object store, and {error.name or 'what it takes'} is not installed",
            hint="pip install 'protokv[object-store]'",
        ) from error
    return made


def suffix_of(path: StatePath) -> str | None:
    """The suffix of a path by which its form is found, that of a kept commit too; None where there is none."""
    name = MOMENT.sub("", os.fspath(path).rstrip("/"))
    return next((suffix for suffix in FORMS if name.endswith(suffix)), None)
