"""The sealed document of a state: its header and what a form adds to it, as one JSON text that tells of any change.

Owns the digest over the document, and the one way to say that a state is damaged.
Knows nothing of where the text is kept.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound, shown
from protokv.snapshot.digest import canonical, document_digest
from protokv.state import Header, State, check_tensor_names

# Under which the document stands in whatever a form writes.
KEY = "protokv"

_NOT_A_STATE = "the file is damaged, or is not a state of protokv"

Found = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of the tensors that a state says it holds, by name."""

Admit = Callable[[Header, Found], None]
"""Asked before memory is taken for the tensors of a state; StateCorrupt if such a state cannot be."""


def seal(state: State, limit: int, digests: Mapping[str, str]) -> str:
    """The document of a state: its header, the digests of all else, and the digest of these.

    Raises:
        StateError: The header could not be read again, or takes more than `limit` bytes, so it must not be written.
    """
    try:
        check_tensor_names(state.tensors)
        document: dict[str, Any] = {"header": state.to_json(), "digests": digests}
        Header.from_json(json.loads(canonical(document["header"])))
        text = canonical({**document, "digest": document_digest(document)})
    except (TypeError, ValueError) as error:
        raise StateError(f"the header of the state is not plain JSON: {error}") from error
    except (StateCorrupt, StateMismatch) as error:
        raise StateError(f"the state cannot be written: {error.message}") from error
    check_length(len(text), limit)
    return text


def check_length(takes: int, limit: int) -> None:
    """StateError if a header of so many bytes could not be read again."""
    if takes > limit:
        raise StateError(f"the header of the state takes {takes} bytes, at most {limit} are allowed")


def unseal(document: dict[str, Any]) -> tuple[Header, dict[str, str]]:
    """The header, and the digests of all else.

    Raises:
        StateCorrupt: It is not the one that was sealed, or makes no sense; the field is named.
        StateMismatch: The format is newer than this version reads.
    """
    digest = document.pop("digest", None)
    try:
        intact = digest == document_digest(document)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise StateCorrupt("header: it is not the one that was saved")
    header = Header.from_json(document.get("header"))
    if set(document) != {"header", "digests"} or not isinstance(document["digests"], dict):
        raise StateCorrupt("header: expected digests, an object, and no other part")
    return header, document["digests"]


def parse_json(data: bytes | str) -> dict[str, Any]:
    """The JSON object in this text, StateCorrupt for anything else. A digest tells whether it is what was saved."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StateCorrupt(f"header: not the JSON that was saved ({shown(error)})") from error
    if not isinstance(found, dict):
        raise StateCorrupt("header: expected an object")
    return found


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says in one line, with the path, what is wrong with a state, and what the system does not let us read.

    Raises:
        StateNotFound: Nothing is there.
        StateError: It cannot be read.
    """
    where = os.fspath(path)
    try:
        yield
    except (StateCorrupt, StateMismatch) as error:
        if error.message.startswith(where):
            raise
        raise type(error)(f"{where}: {error.message}", hint=error.hint or _NOT_A_STATE) from error
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        if number == errno.ELOOP:
            raise StateCorrupt(f"{where}: a link that leads to itself", hint=_NOT_A_STATE) from error
        if number in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise not_found(path) from None
        why = getattr(error, "strerror", None) or str(error)
        raise StateError(f"cannot read the state {where}: {why}") from error


def not_ours(path: str | os.PathLike[str], why: str = "") -> StateError:
    """The error of a place that a state must not be written to."""
    what = f"cannot write the state {os.fspath(path)}: what is there is no state of ours"
    return StateError(what + why, hint="Remove it, or choose another name.")


def not_found(path: str | os.PathLike[str]) -> StateNotFound:
    """The error of a state that is not there."""
    hint = "check the spelling; `protokv ingest VIDEO -o STATE` makes one"
    return StateNotFound(f"no state at {os.fspath(path)}", hint=hint)
