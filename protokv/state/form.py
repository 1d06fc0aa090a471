"""The interface of a storage form, and the choice of a form by the path of a state.

The suffix of a path chooses a form. The module of a form is imported when it is first needed. Each form keeps writers
apart in its own way: files have a lock beside them, an object is replaced on a condition. `api` decides which
commits are kept and which one answers for a time.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from pathlib import PurePath
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from protokv.errors import SourceError, StateCorrupt, StateError, UnknownForm, did_you_mean
from protokv.machine import memory_bytes
from protokv.state.snapshot import Admit, Found, Header, State
from protokv.texts import find_broken

S = TypeVar("S")
T = TypeVar("T")

StatePath = str | os.PathLike[str]

# The class of each form, as module:class.
FORMS = {
    ".safetensors": "protokv.state.files:SafetensorsForm",
    ".zarr": "protokv.state.zarr:ZarrForm",
    ".pt": "protokv.state.files:PtForm",
}
DEFAULT_SUFFIX = ".safetensors"

# A kept commit has the name of the state with its stream time appended.
MOMENT = re.compile(r"@(\d{6,}\.\d{3})s$")
_URL = re.compile(r"[a-z][a-z0-9+.-]+://")

# Give up on a state that is replaced faster than it can be read.
_ATTEMPTS = 20


class Stored(ABC):
    """A state whose header and digests are read and verified; its tensors are not read yet.

    Attributes:
        header: of the state.
        digests: of everything else, by the names that the form uses.
    """

    header: Header
    digests: Mapping[str, str]

    @property
    @abstractmethod
    def found(self) -> Found:
        """Shape and dtype of the tensors. StateCorrupt if they do not fit the stored bytes."""

    @abstractmethod
    def tensors(self, verify: bool, names: Collection[str] | None = None) -> Mapping[str, Tensor]:
        """Return the tensors of `found`, or some of them, contiguous CPU copies; check their digests if `verify`."""

    @abstractmethod
    def nbytes(self) -> int:
        """Return the stored bytes."""


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
    def kept(self) -> Iterator[tuple[str, Header]]:
        """Yield the place and header of each kept commit, of any stream. Skip files that only have such a name."""

    @abstractmethod
    def keep(self, header: Header) -> None:
        """Keep the current state, which has this header, as a commit of its own, unless the name is taken."""

    @abstractmethod
    def retire(self, at: str) -> None:
        """Remove a kept commit if possible."""

    def read(self, at: str | None = None, *, verify: bool = True, admit: Admit | None = None) -> State:
        """Read the kept commit `at`, or the current state; see `api.load_state`."""

        def read(stored: Stored) -> State:
            found, available = stored.found, memory_bytes()
            if admit is not None:
                admit(stored.header, found)
            # Sparse files can claim tensors that were never written.
            size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in found.values())
            if available is not None and size > available:
                raise StateError(f"the state has {size} bytes of tensors, this machine has {available} bytes of memory")
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
        """Return the stored bytes of the current state, without kept commits."""
        return self.look(None, lambda stored: stored.nbytes())


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


def is_url(path: StatePath) -> bool:
    """Return True if a path names a place outside the file system."""
    return isinstance(path, str) and _URL.match(path) is not None


def form_of(path: StatePath, *, to_read: bool = False) -> Form:
    """Return the form of a state at this path. With `to_read`, an unknown suffix means the default form.

    Raises:
        UnknownForm: the suffix names no form, or it is that of a video; or the path is not UTF-8.
        StateError: a package that the form needs is not installed.
    """
    if find_broken(str(path)) is not None:
        # Found out by the libraries of the forms only when a whole video is watched.
        raise UnknownForm(f"the path {path} is not UTF-8", hint="choose another name")
    suffix = suffix_of(path) or ""
    if to_read and not suffix and not is_url(path):
        _refuse_video(path)
        suffix = DEFAULT_SUFFIX
    if not suffix or (is_url(path) and suffix == ".zarr"):
        known, given = sorted(FORMS), PurePath(path).suffix
        known = [one for one in known if one != ".zarr" or not is_url(path)]
        raise UnknownForm(
            f"expected a path that ends in one of {', '.join(known)}, got {path}",
            hint=did_you_mean(given, known) or "choose another name",
        )
    module, _, name = FORMS[suffix].partition(":")
    made = getattr(import_module(module), name)
    if not is_url(path):
        return cast(Form, made(path))
    from protokv.state.objects import ObjectForm

    try:
        return ObjectForm(os.fspath(path), made)
    except SourceError as error:
        raise StateError(error.message, hint=error.hint) from error


def _refuse_video(path: StatePath) -> None:
    """Tell a user who names a video where its state belongs. UnknownForm."""
    # This imports what reads frames.
    from protokv.video.address import VIDEO_SUFFIXES

    video = PurePath(path)
    if video.suffix.lower() in VIDEO_SUFFIXES:
        state = video.with_suffix(DEFAULT_SUFFIX).name
        raise UnknownForm(
            f"{path} is a video, not a state", hint=f"watch it first: protokv ingest {path}; it writes {state}"
        )


def suffix_of(path: StatePath) -> str | None:
    """Return the suffix that chooses the form of a state or kept commit; None if there is none."""
    name = MOMENT.sub("", os.fspath(path).rstrip("/"))
    return next((suffix for suffix in FORMS if name.endswith(suffix)), None)
