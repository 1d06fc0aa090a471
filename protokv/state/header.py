"""A state: its `Header`, its tensors, and the sealed document that goes with them into every form.

A state is a header of plain values and tensors by name. The header says which model made it, how its memory is
configured, where the stream stands and what was watched. `seal` makes one JSON document of the header, a digest of
every tensor and a digest of itself; `unseal` refuses a document that was changed. A state is untrusted input: every
field and size is checked before it is used. Knows no models and not what the tensors mean.
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

from protokv import __version__
from protokv.core.backbone import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound, cause_of, shown
from protokv.state.digest import canonical_json, digest_document

FORMAT_VERSION = 1

# The name of the document in every form.
KEY = "protokv"

# A typical header takes 20 kB.
HEADER_LIMIT_BYTES = 1 << 20

# A tensor's name is a path of names, such as `bank.key_center`; forms with groups lay it out as such.
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")

# No configuration nests deeper.
_DEEPEST = 8

_NOT_A_STATE = "the file is damaged, or is not a state of protokv"


@dataclass(frozen=True, kw_only=True)
class Header:
    """All of a state except its tensors. `memory`, `source` and `settings` are plain JSON objects."""

    backbone: BackboneIdentity
    memory: Mapping[str, Any]  # MemoryConfig.to_dict()
    clock: StreamClock
    source: Mapping[str, Any] | None = None  # SourceInfo.to_dict()
    settings: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False  # the source was read to its end
    format_version: Annotated[int, msgspec.Meta(ge=1)] = FORMAT_VERSION
    created_by: str = f"protokv {__version__}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        found: dict[str, Any] = msgspec.to_builtins({f.name: getattr(self, f.name) for f in fields(Header)})
        if self.backbone.revision is None:
            # Only hub models have one.
            del found["backbone"]["revision"]
        return found

    @classmethod
    def from_json(cls, data: object) -> Header:
        """Return the header of plain values; every field is checked against its annotation.

        Raises:
            StateMismatch: the format is newer than this version reads.
            StateCorrupt: a field is missing, unknown or of a wrong type; the message names it.
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
            for value, depth in _values(data[name]) if isinstance(data, dict) else ():
                if depth > _DEEPEST:
                    raise StateCorrupt(f"{name}: nested more than {_DEEPEST} levels deep")
                if type(value) is int and not -(2**63) <= value < 2**63:
                    raise StateCorrupt(f"{name}: an integer of more than 64 bits, {shown(value)}")
        try:
            return msgspec.convert(data, Header)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            raise StateCorrupt(f"{where.rstrip('`') or 'header'}: {shown(what)}") from None


class TensorInfo(NamedTuple):
    """A description of a tensor for other readers: the names of its axes, what it holds, its unit."""

    dims: tuple[str, ...]
    meaning: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class State(Header):
    """A header and the tensors by name, on any device; after loading they are on the CPU.

    `tensor_info` describes them in forms that can hold it; it is not read back.
    """

    tensors: Mapping[str, Tensor]
    tensor_info: Mapping[str, TensorInfo] = field(default_factory=dict)

    @classmethod
    def join(
        cls, header: Header, tensors: Mapping[str, Tensor], tensor_info: Mapping[str, TensorInfo] | None = None
    ) -> State:
        """Return a state of this header and these tensors."""
        fields_ = {f.name: getattr(header, f.name) for f in fields(Header)}
        return cls(**fields_, tensors=tensors, tensor_info=tensor_info or {})


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor in a state, by name, as the state declares them."""

Admit = Callable[[Header, Shapes], None]
"""Called before memory is allocated for tensors; raises StateCorrupt if no stream leaves such a state."""


def check_tensor_names(names: Iterable[str]) -> None:
    """Check that names are plain words joined by dots, and that no name is also the group of another.

    Raises:
        StateCorrupt: naming the tensor.
    """
    groups: set[str] = set()
    found: set[str] = set()
    for name in names:
        # Some file systems do not distinguish upper from lower case.
        folded = name.lower()
        if not _TENSOR_NAME.fullmatch(name) or folded in found:
            raise StateCorrupt(f"tensor {shown(name)}: not a name that a tensor can have here")
        parts = folded.split(".")
        found.add(folded)
        groups |= {".".join(parts[:n]) for n in range(1, len(parts))}
    for name in found & groups:
        raise StateCorrupt(f"tensor {shown(name)}: its name is also that of a group")


def _values(value: object, depth: int = 0) -> Iterator[tuple[object, int]]:
    """Yield a JSON value and all in it, each with the number of lists and objects around it; no deeper than refused."""
    yield value, depth
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inside if depth <= _DEEPEST else ():
        yield from _values(one, depth + 1)


def seal(state: State, digests: Mapping[str, str]) -> str:
    """Return the document of a state: its header, the digests of its tensors, and the digest of both, as JSON.

    Raises:
        StateError: the header could not be read again, or the document is too long.
    """
    try:
        check_tensor_names(state.tensors)
        document: dict[str, Any] = {"header": state.to_json(), "digests": digests}
        Header.from_json(json.loads(canonical_json(document["header"])))
        text = canonical_json({**document, "digest": digest_document(document)})
    except (TypeError, ValueError) as error:
        raise StateError(f"the header of the state is not plain JSON: {error}") from error
    except (StateCorrupt, StateMismatch) as error:
        raise StateError(f"the state cannot be written: {error.message}") from error
    check_length(len(text))
    return text


def check_length(takes: int) -> None:
    """Raise StateError if a header takes more bytes than allowed; it could not be read again."""
    if takes > HEADER_LIMIT_BYTES:
        raise StateError(f"the header of the state takes {takes} bytes, at most {HEADER_LIMIT_BYTES} are allowed")


def unseal(text: object) -> tuple[Header, dict[str, str]]:
    """Return the header and the digests of the tensors that a document holds.

    Raises:
        StateCorrupt: it is no document, it was changed, or a field is not valid; the message names it.
        StateMismatch: the format is newer than this version reads.
    """
    if not isinstance(text, str):
        raise StateCorrupt("header: there is no state of protokv in it")
    document = parse_object(text, "header")
    digest = document.pop("digest", None)
    try:
        intact = digest == digest_document(document)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise StateCorrupt("header: it is not the one that was saved")
    header = Header.from_json(document.get("header"))
    if set(document) != {"header", "digests"} or not isinstance(document["digests"], dict):
        raise StateCorrupt("header: expected digests, an object, and no other part")
    check_tensor_names(document["digests"])
    return header, document["digests"]


def parse_object(data: bytes | str, what: str) -> dict[str, Any]:
    """Return the JSON object in a text; StateCorrupt, naming `what` it should be, if it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StateCorrupt(f"{what}: not the JSON that was saved ({shown(error)})") from error
    if not isinstance(found, dict):
        raise StateCorrupt(f"{what}: expected an object")
    return found


@contextmanager
def explain_read_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of reading a state into one line that names its path.

    Raises:
        StateNotFound: nothing is there.
        StateCorrupt, StateMismatch: as raised inside, with the path.
        StateError: the system cannot read it.
    """
    where = os.fspath(path)
    try:
        yield
    except (StateCorrupt, StateMismatch) as error:
        if error.message.startswith(where):
            raise
        raise type(error)(f"{where}: {error.message}", hint=error.hint or _NOT_A_STATE) from error
    except (OSError, ValueError, MemoryError) as error:
        number = getattr(error, "errno", None)
        if number == errno.ELOOP:
            raise StateCorrupt(f"{where}: a link that leads to itself", hint=_NOT_A_STATE) from error
        if number in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise not_found(path) from None
        raise StateError(f"cannot read the state {where}: {cause_of(error)}") from error


def not_found(path: str | os.PathLike[str]) -> StateNotFound:
    """Return the error of a state that does not exist."""
    hint = "check the spelling; `protokv ingest VIDEO -o STATE` makes one"
    return StateNotFound(f"no state at {os.fspath(path)}", hint=hint)
