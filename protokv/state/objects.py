"""A state in an object store: the one file of `.safetensors` or `.pt`, put whole by a conditional request.

A commit replaces the object only if it is still the one that this writer has seen (`If-Match` with its ETag, or
`If-None-Match: *` where nothing was), so a second writer is found without a lock. A kept commit is an object of its
own, `KEY@000123.000s`. One request puts at most 5 GB into S3. `protokv.video.bucket` has the client.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from protokv.errors import SourceError, SourceNotFound, StateError, StateLocked
from protokv.state.commit import explain_read_errors, not_found
from protokv.state.form import Form, Stored, format_kept_suffix
from protokv.state.header import KEY, MOST_BYTES, Header, State, unseal
from protokv.video.bucket import explain_errors, fetch, list_beginning, open_store

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult, UpdateVersion

T = TypeVar("T")


class ObjectForm(Form):
    """One object; `file` is the form of a file with the same contents."""

    def __init__(self, path: str, file: type[Form]) -> None:
        super().__init__(path)
        self._address, self._file = path, file
        self._store, self._key = open_store(path)
        self._mode: PutMode = "create"

    def write(self, path: Path, document: str, state: State) -> None:
        """Write the file."""
        self._file(path).write(path, document, state)

    def map(self, path: Path) -> Stored:
        """Map the file."""
        return self._file(path).map(path)

    def check_target(self) -> None:
        """Ask for the object, and remember which one is there; of a missing one, ask for its bucket."""
        with _explain(self._address, "write"):
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

    def replace(self, state: State, keep: Header | None = None) -> None:
        """Put the object in place; before, let the store copy the old one."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with tempfile.TemporaryDirectory(prefix="protokv-") as folder:
            path = Path(folder, "state")
            self._file(path).replace(state)
            with _explain(self._address, "write"):
                if keep is not None:
                    self._store.copy(self._key, self._key + format_kept_suffix(keep))
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
        with tempfile.TemporaryDirectory(prefix="protokv-") as folder, _explain(address, "read"):
            fetch(address, path := Path(folder, "state"))
            with explain_read_errors(address):
                return read(self.map(path))

    def read_header(self, at: str | None = None) -> Header:
        """Read the header alone: of a `.safetensors` without the tensors."""
        address = at or self._address
        with _explain(address, "read"):
            start = self._store.get(open_store(address)[1], options={"range": (0, 2 * MOST_BYTES)}).bytes().to_bytes()
        length = int.from_bytes(start[:8], "little")
        if self._file.suffix == ".safetensors" and length <= len(start) - 8:
            with explain_read_errors(address):
                return unseal(json.loads(start[8 : 8 + length])["__metadata__"][KEY])[0]
        return super().read_header(at)

    def stored_bytes(self) -> int:
        """Return the size of the object."""
        with _explain(self._address, "read"):
            return int(self._store.head(self._key)["size"])

    def list_kept(self) -> Iterator[tuple[str, Header]]:
        """Yield the objects beside the state whose name and header agree, oldest first."""
        with _explain(self._address, "read"):
            places = list(list_beginning(f"{self._address}@"))
        yield from self._read_kept(self._address, places)

    def retire(self, at: str) -> None:
        """Delete an object if the store allows it."""
        with suppress(SourceError), explain_errors(at, "write"):
            self._store.delete(open_store(at)[1])


def _condition(found: ObjectMeta | PutResult) -> UpdateVersion:
    """Return the condition that this object is still there. Google asks for a version, the others for a tag."""
    return cast("UpdateVersion", {name: found[name] for name in ("e_tag", "version") if found.get(name)})


@contextmanager
def _explain(address: str | os.PathLike[str], doing: str) -> Iterator[None]:
    """Turn an error of the store into a StateError."""
    try:
        with explain_errors(os.fspath(address), doing):
            yield
    except SourceNotFound:
        raise not_found(address) from None
    except SourceError as error:
        raise StateError(
            f"cannot {doing} the state {address}: {error.message.partition(': ')[2]}", hint=error.hint
        ) from error
