"""A state in an object store: the one file of `.safetensors` or `.pt`, put whole by a conditional request.

A commit replaces the object only if it is still the one that this writer has seen (`If-Match` with its ETag, or
`If-None-Match: *` where nothing was), so a second writer is found without a lock. A kept commit is an object of its
own, `KEY@000123.000s`. One request puts at most 5 GB into S3. `protokv.video.bucket` has the client.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from protokv.errors import SourceError, SourceNotFound, StateCorrupt, StateError, StateLocked, StateMismatch
from protokv.state.form import KEPT_SUFFIX, Form, LocalForm, Stored, format_kept_suffix
from protokv.state.header import HEADER_LIMIT_BYTES, Header, State, explain_read_errors, not_found
from protokv.state.safetensors import SafetensorsForm, parse_header
from protokv.video.bucket import explain_errors, fetch, list_beginning, open_store

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult, UpdateVersion

T = TypeVar("T")


class ObjectForm(Form):
    """One object; `file` is the form of a file with the same contents."""

    def __init__(self, path: str, file: type[LocalForm]) -> None:
        super().__init__(path)
        self._address, self._file = path, file
        self._store, self._key = open_store(path)
        self._mode: PutMode = "create"

    def check_target(self) -> None:
        """Ask for the object, and remember which one is there; of a missing one, ask for its bucket."""
        with _explain_state_errors(self._address, "write"), explain_errors(self._address, "write"):
            try:
                self._mode = _condition(self._store.head(self._key))
            except FileNotFoundError:
                self._mode = "create"
                any(list_beginning(self._address))

    def __enter__(self) -> Self:
        """Remember which object is to be replaced."""
        self.check_target()
        self.locked = True
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing is held."""
        self.locked = False

    def replace(self, state: State) -> None:
        """Put the object in place."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with tempfile.TemporaryDirectory(prefix="protokv-") as folder:
            path = Path(folder, "state")
            self._file(path).replace(state)
            with _explain_state_errors(self._address, "write"), explain_errors(self._address, "write"):
                try:
                    put = self._store.put(self._key, path, mode=self._mode, use_multipart=False)
                except (AlreadyExistsError, PreconditionError) as error:
                    raise StateLocked(
                        f"the state {self._address} was committed to by another writer meanwhile",
                        hint="it is not overwritten; continue from the state that is there now, or write elsewhere",
                    ) from error
            self._mode = _condition(put)

    def look(self, at: str | None, read: Callable[[Stored], T]) -> T:
        """Copy the object into a temporary file and read that."""
        address = at or self._address
        with (
            tempfile.TemporaryDirectory(prefix="protokv-") as folder,
            explain_read_errors(address),
            _explain_state_errors(address, "read"),
        ):
            fetch(address, path := Path(folder, "state"))
            try:
                return self._file(path).look(None, read)
            except (StateCorrupt, StateMismatch, StateError) as error:
                raise type(error)(error.message.replace(str(path), address), hint=error.hint) from error

    def list_kept(self) -> Iterator[tuple[str, Header]]:
        """Yield the objects beside the state whose name and header agree, oldest first."""
        with _explain_state_errors(self._address, "read"):
            for address in list_beginning(f"{self._address}@"):
                if (named := KEPT_SUFFIX.search(address)) and address[: named.start()] == self._address:
                    with suppress(StateCorrupt, StateMismatch):
                        header = self.read_header(address)
                        if format_kept_suffix(header) == named[0]:
                            yield address, header

    def keep(self, header: Header) -> None:
        """Let the store copy the object."""
        with _explain_state_errors(self._address, "write"), explain_errors(self._address, "write"):
            self._store.copy(self._key, self._key + format_kept_suffix(header))

    def retire(self, at: str) -> None:
        """Delete an object if the store allows it."""
        with suppress(SourceError), explain_errors(at, "write"):
            self._store.delete(open_store(at)[1])

    def read_header(self, at: str | None = None) -> Header:
        """Read the header alone: of a `.safetensors` without the tensors."""
        if self._file is not SafetensorsForm:
            return super().read_header(at)
        address = at or self._address
        key = open_store(address)[1]
        with explain_read_errors(address), _explain_state_errors(address, "read"), explain_errors(address):
            there = self._store.get(key, options={"range": (0, HEADER_LIMIT_BYTES + 8)})
            return parse_header(there.bytes().to_bytes(), there.meta["size"])

    def stored_bytes(self) -> int:
        """Return the size of the object."""
        with _explain_state_errors(self._address, "read"), explain_errors(self._address):
            return int(self._store.head(self._key)["size"])


def _condition(found: ObjectMeta | PutResult) -> UpdateVersion:
    """Return the condition that this object is still there. Google asks for a version, the others for a tag."""
    wanted: UpdateVersion = {}
    if tag := found.get("e_tag"):
        wanted["e_tag"] = tag
    if version := found.get("version"):
        wanted["version"] = version
    return wanted


@contextmanager
def _explain_state_errors(address: str | os.PathLike[str], doing: str) -> Iterator[None]:
    """Turn an error of the store into a StateError."""
    try:
        yield
    except SourceNotFound:
        raise not_found(address) from None
    except SourceError as error:
        raise StateError(
            f"cannot {doing} the state {address}: {error.message.partition(': ')[2]}", hint=error.hint
        ) from error
