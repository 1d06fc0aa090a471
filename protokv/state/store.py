"""A state at a path, its lock, its commits, its kept ones: `StateStore` for a file system,
`_BucketStore` for objects.

The suffix of the path chooses the form. A commit of `video.safetensors` that is kept lies beside it
as `video.safetensors@000123.000s`; it is a complete state, and `*.safetensors` does not match it.

At `s3://`, `gs://` and `az://` the one file of `.safetensors` or `.pt` is an object, put whole by
one conditional request. It replaces the object only if that is still the one which this writer has
seen (`If-Match` with its ETag, or `If-None-Match: *` where nothing was), so a second writer is
found without a lock. S3 takes at most 5 GB in one request.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from protokv.bucket import (
    explain_bucket_errors,
    fetch_bucket_file,
    list_by_prefix,
    open_bucket,
)
from protokv.errors import (
    ConfigError,
    SourceError,
    SourceNotFound,
    StateCorrupt,
    StateError,
    StateLocked,
    StateMismatch,
    StateNotFound,
    UnknownForm,
    did_you_mean,
)
from protokv.state import commit as files
from protokv.state.commit import StatePath as StatePath
from protokv.state.commit import (
    explain_read_errors,
    explain_write_errors,
    find_state_place,
    lock,
    make_state_not_found,
)
from protokv.state.forms import SafetensorsForm, StateForm, StoredState
from protokv.state.header import (
    HEADER_KEY,
    MOST_HEADER_BYTES,
    State,
    StateHeader,
    seal_header,
    unseal_header,
)
from protokv.state.pt import PtForm
from protokv.state.sources import is_earlier_state, is_same_stream, read_fingerprints
from protokv.state.zarr import ZarrForm
from protokv.texts import find_invalid_character

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult, UpdateVersion

_T = TypeVar("_T")

STATE_FORMS: dict[str, StateForm] = {
    one.suffix: one for one in (SafetensorsForm(), ZarrForm(), PtForm())
}
_DEFAULT_SUFFIX = SafetensorsForm.suffix

# The name of a kept commit is that of the state with this appended, its stream time.
_KEPT_SUFFIX = re.compile(r"@(\d{6,}\.\d{3})s$")

# File systems allow names of 255 bytes. The suffix, and what kept and unfinished commits add to a
# name, need the rest.
_LONGEST_STEM_BYTES = 200

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")


class StateStore:
    """A state at a path in the file system. As a context manager: the right to write there.

    The path holds the old or the new state whole at any time. Every method raises `StateError`:
    `StateNotFound` if nothing is there, `StateCorrupt` if it is damaged or hostile, `StateMismatch`
    if a newer version wrote it.
    """

    # a second writer is refused: after `__enter__`, but not on a file system without locks
    locked: bool = False

    def __init__(self, path: StatePath, form: StateForm, keep: int | None = None) -> None:
        """Touch nothing yet. `keep` commits stay, including the current one; None: keep and remove
        nothing.
        """
        self.path = path
        self.form = form
        self.keep = keep

    @property
    def _target(self) -> Path:
        """The path with links resolved, so that a commit replaces the target of a link."""
        return Path(os.path.realpath(self.path))

    def check_target(self) -> None:
        """Make the folder. StateError if it cannot be made, or what is there is no state."""
        with explain_write_errors(self.path):
            target = self._target
            target.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(target) and self.form.is_foreign(target):
                raise StateError(
                    f"cannot write the state {self.path}: what is there is no {self.form.suffix} "
                    "of ours",
                    hint="choose another name",
                )

    def __enter__(self) -> Self:
        """Take the right to write, without waiting. StateError as `check_target`; StateLocked if
        another has it.
        """
        self.check_target()
        self._lock = self._hold()
        self.locked = self._lock.__enter__()
        return self

    def _hold(self) -> AbstractContextManager[bool]:
        return lock(self.path)

    def __exit__(self, *_: Any) -> None:
        """Give the right back."""
        self.locked = False
        self._lock.__exit__(None, None, None)

    def commit(self, state: State) -> int:
        """Put a state in place atomically and durably; return its stored bytes. One thread at a
        time may call this.

        The old one becomes a kept commit if it is an earlier moment of the same stream and `keep`
        is above 1. It is still there after a StateError, which is StateLocked if another writer has
        committed meanwhile.
        """
        old = None
        if self.keep is not None and self.keep > 1:
            with suppress(StateNotFound, StateCorrupt, StateMismatch):
                old, _ = self.read_header()
        self._replace(
            state, _name_kept(old) if old is not None and is_earlier_state(old, state) else None
        )
        if self.keep is not None:
            # The new state is in place. A writer that may not list or remove leaves the others to
            # the next commit.
            with suppress(StateError):
                self._retire_others(state, self.keep)
        return self.read_header()[1]

    def _replace(self, state: State, kept: str | None) -> None:
        """Put a state in place; the old one gets a name that ends in `kept`, unless something has
        it.
        """
        self.check_target()
        with explain_write_errors(self.path):
            target = self._target
            past = target.with_name(target.name + (kept or ""))
            tensors = {
                name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()
            }
            plain = replace(state, tensors=tensors)
            document = seal_header(plain)
            past_or_none = None if os.path.lexists(past) or not kept else past
            files.replace_state(
                target, lambda path: self.form.write(path, document, plain), past_or_none
            )

    def _retire_others(self, state: State, keep: int) -> None:
        """Remove all kept commits of this stream but the last ones."""
        ours = {at: one for at, one in self.list_kept() if is_same_stream(one, state)}
        past = sorted(
            (at for at, one in ours.items() if is_earlier_state(one, state)),
            key=lambda at: ours[at].clock.stream_time_s,
        )
        for at in ours.keys() - past[max(0, len(past) - keep + 1) :]:
            self._retire(at)

    def look(self, read: Callable[[StoredState], _T], at: str | None = None) -> _T:
        """Return `read(stored)` of the kept commit `at` or the current state; again if it was
        replaced meanwhile.
        """
        path = at or self.path
        target = Path(os.path.realpath(path))

        def identify() -> tuple[Path, int, int]:
            place = find_state_place(target)
            try:
                found = place.stat()
            except FileNotFoundError:  # the commit that had moved it has ended
                place = target
                found = place.stat()
            return place, found.st_ino, found.st_mtime_ns

        while True:
            with explain_read_errors(path):
                seen = identify()
                try:
                    if self.form.is_folder != seen[0].is_dir():
                        raise StateCorrupt(f"it is no {self.form.suffix}")
                    found = read(self.form.map(seen[0]))
                except Exception:
                    # Half of a folder may be of the old state, and half of the new one.
                    if identify() == seen:
                        raise
                    continue
                if identify() == seen:
                    return found

    def read_header(self, at: str | None = None) -> tuple[StateHeader, int]:
        """Read and verify the header alone; return it and the stored bytes of the state, without
        kept commits.
        """
        return self.look(lambda stored: (stored.header, stored.nbytes), at)

    def list_kept(self) -> Iterator[tuple[str, StateHeader]]:
        """Yield where each kept commit is, of any stream, and its header. Skip what only has such a
        name.
        """
        ours, places = self._list_places()
        for at in places:
            if (named := _KEPT_SUFFIX.search(at)) and at[: named.start()] == ours:
                with suppress(StateNotFound, StateCorrupt, StateMismatch):
                    header, _ = self.read_header(at)
                    if _name_kept(header) == named[0]:
                        yield at, header

    def _list_places(self) -> tuple[str, list[str]]:
        """Return the place of the state, and all places in its folder, in order."""
        with explain_read_errors(self.path):
            target = self._target
            found = sorted(target.parent.iterdir()) if target.parent.is_dir() else []
            return os.fspath(target), [str(one) for one in found if not one.is_symlink()]

    def _retire(self, at: str) -> None:
        """Remove a kept commit. If a reader prevents that, the next commit removes it."""
        with suppress(OSError):
            files.remove_kept_commit(self._target, Path(at))


class _BucketStore(StateStore):
    """A state that is one object."""

    def __init__(self, address: str, form: StateForm, keep: int | None = None) -> None:
        super().__init__(address, form, keep)
        self._address = address
        self._bucket, self._key = open_bucket(address)
        self._mode: PutMode = "create"

    def check_target(self) -> None:
        """Remember which object is there. If there is none, ask whether there is such a bucket."""
        with _explain(self._address, "write"):
            try:
                self._mode = _condition(self._bucket.head(self._key))
            except FileNotFoundError:
                self._mode = "create"
                any(list_by_prefix(self._address))

    def _hold(self) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def _replace(self, state: State, kept: str | None) -> None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with tempfile.TemporaryDirectory(prefix="protokv-") as folder:
            path = Path(folder, "state")
            StateStore(path, self.form).commit(state)
            with _explain(self._address, "write"):
                if kept is not None:
                    self._bucket.copy(self._key, self._key + kept)
                try:
                    put = self._bucket.put(self._key, path, mode=self._mode, use_multipart=False)
                except (AlreadyExistsError, PreconditionError) as error:
                    raise StateLocked(
                        f"the state {self._address} was committed to by another writer meanwhile",
                        hint="it is not overwritten; continue from the state that is there now, or "
                        "write elsewhere",
                    ) from error
            self._mode = _condition(put)

    def look(self, read: Callable[[StoredState], _T], at: str | None = None) -> _T:
        """Copy the object into a temporary file and read that."""
        address = at or self._address
        with tempfile.TemporaryDirectory(prefix="protokv-") as folder, _explain(address, "read"):
            fetch_bucket_file(address, path := Path(folder, "state"))
            with explain_read_errors(address):
                return read(self.form.map(path))

    def read_header(self, at: str | None = None) -> tuple[StateHeader, int]:
        """Read the header alone: of a `.safetensors` without the tensors."""
        address = at or self._address
        with _explain(address, "read"):
            found = self._bucket.get(
                open_bucket(address)[1], options={"range": (0, 2 * MOST_HEADER_BYTES)}
            )
            start = found.bytes().to_bytes()
        length = int.from_bytes(start[:8], "little")
        if self.form.suffix == ".safetensors" and length <= len(start) - 8:
            with explain_read_errors(address):
                document = json.loads(start[8 : 8 + length])["__metadata__"][HEADER_KEY]
                return unseal_header(document)[0], int(found.meta["size"])
        return super().read_header(at)

    def _list_places(self) -> tuple[str, list[str]]:
        with _explain(self._address, "read"):
            return self._address, list(list_by_prefix(f"{self._address}@"))

    def _retire(self, at: str) -> None:
        with suppress(SourceError), explain_bucket_errors(at, "write"):
            self._bucket.delete(open_bucket(at)[1])


def _condition(found: ObjectMeta | PutResult) -> UpdateVersion:
    """Return the condition that this object is still there. Google asks for a version, the others
    for a tag.
    """
    return cast(
        "UpdateVersion", {name: found[name] for name in ("e_tag", "version") if found.get(name)}
    )


@contextmanager
def _explain(address: StatePath, doing: str) -> Iterator[None]:
    try:
        with explain_bucket_errors(os.fspath(address), doing):
            yield
    except SourceNotFound:
        raise make_state_not_found(address) from None
    except SourceError as error:
        why = error.message.partition(": ")[2]
        raise StateError(f"cannot {doing} the state {address}: {why}", hint=error.hint) from error


def _name_kept(header: StateHeader) -> str:
    return f"@{header.clock.stream_time_s:010.3f}s"


def is_remote_state(path: StatePath) -> bool:
    """Return True if a path names a place outside the file system."""
    return isinstance(path, str) and _URL.match(path) is not None


def make_state_name(stem: str) -> str:
    """Return the file name of a state for what it is of; a long one is cut, and ends in a digest of
    all of it.
    """
    name = os.fsencode(stem)
    if len(name) > _LONGEST_STEM_BYTES:
        kept = name[: _LONGEST_STEM_BYTES - 9].decode(errors="ignore")
        stem = f"{kept}-{hashlib.sha256(name).hexdigest()[:8]}"
    return stem + _DEFAULT_SUFFIX


def find_store(path: StatePath, *, to_read: bool = False, keep: int | None = None) -> StateStore:
    """Return the store of a state at this path. With `to_read`, a file without a suffix has the
    default form.

    UnknownForm: the suffix names no form, or a video, or the path is not UTF-8. StateError,
    ConfigError.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"cannot keep {keep} commits", hint="1 is the state alone")
    if find_invalid_character(str(path)) is not None:
        # The libraries would say so only after a whole video was watched.
        raise UnknownForm(f"the path {path} is not UTF-8", hint="choose another name")
    name = _KEPT_SUFFIX.sub("", os.fspath(path).rstrip("/"))
    suffix = next((one for one in STATE_FORMS if name.endswith(one)), None)
    outside = is_remote_state(path)
    if to_read and suffix is None and not outside:
        # A state needs no video.
        from protokv.video.address import VIDEO_SUFFIXES

        if PurePath(path).suffix.lower() in VIDEO_SUFFIXES:
            raise UnknownForm(
                f"{path} is a video, not a state",
                hint=f"watch it first: protokv ingest {path}; it writes "
                f"{PurePath(path).stem}{_DEFAULT_SUFFIX}",
            )
        suffix = _DEFAULT_SUFFIX
    known = {name: one for name, one in STATE_FORMS.items() if not (outside and one.is_folder)}
    if suffix not in known:
        raise UnknownForm(
            f"expected a path that ends in one of {', '.join(sorted(known))}, got {path}",
            hint=did_you_mean(PurePath(path).suffix, known) or "choose another name",
        )
    try:
        return (
            _BucketStore(str(path), known[suffix], keep)
            if outside
            else StateStore(path, known[suffix], keep)
        )
    except SourceError as error:
        raise StateError(error.message, hint=error.hint) from error


def refuse_input_as_target(target: StatePath, *inputs: object) -> None:
    """Refuse a target that is an input, also under another name. Inputs that are no existing paths
    are ignored.
    """
    for one in inputs:
        with suppress(OSError, ValueError):
            if isinstance(one, str | os.PathLike) and Path(target).samefile(one):
                raise ConfigError(
                    f"{os.fspath(target)} is what is read, and would be written over",
                    hint="name another file with -o",
                )


def check_state_replaceable(target: StatePath, state: StateHeader) -> None:
    """Allow to replace a state of the same sources, or nothing. StateMismatch if something else is
    there.
    """
    try:
        there = read_fingerprints(find_store(target, to_read=True).read_header()[0])
    except StateNotFound:
        return
    except (StateCorrupt, StateMismatch):
        there = ()
    if not there or None in there or there != read_fingerprints(state):
        what = "the state of another stream" if there else "no state that can be read"
        raise StateMismatch(
            f"{os.fspath(target)} is there already, and it is {what}",
            hint="replace it with --force",
        )
