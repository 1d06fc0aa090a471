"""What a saved state is: a header of plain values, and tensors by name.

The header says which model made the state, how its memory is configured, where the stream stands and what was
watched. It goes to JSON and back with every field held against its annotation: a state is untrusted input. Knows
nothing of models or of what the tensors mean, and nothing of files.

The sealed document of a state: its header and what a form adds to it, as one JSON text that tells of any change.

Owns the digest over the document, and the one way to say that a state is damaged.
Knows nothing of where the text is kept.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from protokv.core.digest import canonical, document_digest
from protokv.core.records import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound, shown
from protokv.version import __version__

FORMAT_VERSION = 1

# A tensor's name is a path of names, which is how the forms with groups lay it out: `bank.key_center`.
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")

# Deeper than this no configuration of ours nests.
_DEEPEST = 8


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything of a state but its tensors. `memory`, `source` and `settings` are plain JSON objects."""

    backbone: BackboneIdentity
    memory: Mapping[str, Any]  # MemoryConfig.to_dict()
    clock: StreamClock
    source: Mapping[str, Any] | None = None  # SourceInfo.to_dict(), or whatever tells one source from another
    settings: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False  # the source was read to its end
    format_version: Annotated[int, msgspec.Meta(ge=1)] = FORMAT_VERSION
    created_by: str = f"protokv {__version__}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, one a field."""
        found: dict[str, Any] = msgspec.to_builtins({f.name: getattr(self, f.name) for f in fields(Header)})
        if self.backbone.revision is None:
            # Only models of the hub have one.
            del found["backbone"]["revision"]
        return found

    @classmethod
    def from_json(cls, data: object) -> Header:
        """The inverse of `to_json`.

        Raises:
            StateMismatch: The format is newer than this version reads.
            StateCorrupt: A field is missing, unknown or of a wrong type; the message names it.
        """
        version = data.get("format_version") if isinstance(data, dict) else None
        if type(version) is int and version > FORMAT_VERSION:
            raise StateMismatch(
                f"format_version: this version reads {FORMAT_VERSION}, the state has {shown(version)}",
                hint=f"upgrade protokv; the state was written by {shown(data.get('created_by'))}",  # type: ignore[attr-defined]
            )
        for place, record in (("", Header), ("backbone", BackboneIdentity), ("clock", StreamClock)):
            found = data.get(place) if place and isinstance(data, dict) else data
            expected = {f.name for f in fields(record)}
            optional = {"revision"} if record is BackboneIdentity else set()
            if isinstance(found, dict) and (odd := sorted((expected ^ set(found)) - optional, key=str)):
                what = "the field is missing" if odd[0] in expected else "unknown field"
                raise StateCorrupt(f"{f'{place}.'.lstrip('.')}{shown(odd[0])}: {what}")
        for name in ("memory", "source", "settings"):
            if isinstance(data, dict) and _depth(data[name]) > _DEEPEST:
                raise StateCorrupt(f"{name}: nested more than {_DEEPEST} levels deep")
        try:
            return msgspec.convert(data, Header)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            raise StateCorrupt(f"{where.rstrip('`') or 'header'}: {shown(what)}") from None


class TensorInfo(NamedTuple):
    """What a tensor is, for whoever opens a state without this library: names of its axes, what it holds, its unit."""

    dims: tuple[str, ...]
    meaning: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class State(Header):
    """A header and the tensors, by name. Tensors may be on any device; after loading they are on the CPU.

    `tensor_info` describes them for other readers, in forms that can hold it; it is not read back.
    """

    tensors: Mapping[str, Tensor]
    tensor_info: Mapping[str, TensorInfo] = field(default_factory=dict)

    @classmethod
    def of(cls, header: Header, tensors: Mapping[str, Tensor]) -> State:
        """Return a state of this header and these tensors."""
        return cls(**{f.name: getattr(header, f.name) for f in fields(Header)}, tensors=tensors)


def check_tensor_names(names: Iterable[str]) -> None:
    """Whether these can be the names of a state's tensors: plain words joined by dots, none of them a group of others.

    Raises:
        StateCorrupt: the name that cannot be.
    """
    groups: set[str] = set()
    found: set[str] = set()
    for name in names:
        # Not every file system tells upper from lower case.
        folded = name.lower()
        if not _TENSOR_NAME.fullmatch(name) or folded in found:
            raise StateCorrupt(f"tensor {shown(name)}: not a name that a tensor can have here")
        parts = folded.split(".")
        found.add(folded)
        groups |= {".".join(parts[:n]) for n in range(1, len(parts))}
    for name in found & groups:
        raise StateCorrupt(f"tensor {shown(name)}: its name is also that of a group")


def _depth(value: object) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside), default=-1)


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
