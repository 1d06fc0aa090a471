"""A state: its `Header`, its tensors, and the sealed document that goes with them into every form.

A state is a header of plain values and tensors by name. The header says which model made it, how its memory is
configured, where the stream stands and what was watched. `seal` makes one JSON document of the header, a digest of
every tensor and a digest of itself; `unseal` refuses a document that was changed. Knows no models and not what the
tensors mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import msgspec
from torch import Tensor

from protokv import __version__
from protokv.core.backbone import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.core.tensors import TensorSpec
from protokv.errors import StateCorrupt, StateError, StateMismatch, shown
from protokv.state.digest import canonical_json, digest_document

FORMAT_VERSION = 1

# The name of the document in every form.
KEY = "protokv"

# Of a document, which takes 20 kB; readers of some forms look no further.
MOST_BYTES = 1 << 20

# A tensor's name is a path of names, such as `bank.key_center`; forms with groups lay it out as such.
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")


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
            StateCorrupt: a field is missing or of a wrong type; the message names it.
        """
        version = data.get("format_version") if isinstance(data, dict) else None
        if type(version) is int and version > FORMAT_VERSION:
            raise StateMismatch(
                f"format_version: this version reads {FORMAT_VERSION}, the state has {shown(version)}",
                hint="upgrade protokv",
            )
        try:
            return msgspec.convert(data, Header)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            raise StateCorrupt(f"{where.rstrip('`') or 'header'}: {shown(what)}") from None


@dataclass(frozen=True, kw_only=True)
class State(Header):
    """A header and the tensors by name, on any device; after loading they are on the CPU.

    `tensor_info` describes them in forms that can hold it; it is not read back.
    """

    tensors: Mapping[str, Tensor]
    tensor_info: Mapping[str, TensorSpec] = field(default_factory=dict)

    @classmethod
    def join(cls, header: Header, tensors: Mapping[str, Tensor]) -> State:
        """Return a state of this header and these tensors."""
        return cls(**{f.name: getattr(header, f.name) for f in fields(Header)}, tensors=tensors)


def check_tensor_names(names: Iterable[str]) -> None:
    """Check that names are plain words joined by dots: they become paths. StateCorrupt, naming the tensor."""
    for name in names:
        if not _TENSOR_NAME.fullmatch(name):
            raise StateCorrupt(f"tensor {shown(name)}: not a name that a tensor can have here")


def seal(state: State, digests: Mapping[str, str]) -> str:
    """Return the document of a state: its header, the digests of its tensors, and the digest of both, as JSON.

    Raises:
        StateError: the header could not be read again, or is too long.
    """
    try:
        check_tensor_names(state.tensors)
        document: dict[str, Any] = {"header": state.to_json(), "digests": digests}
        text = canonical_json({**document, "digest": digest_document(document)})
        Header.from_json(document["header"])
    except (TypeError, ValueError) as error:
        raise StateError(f"the header of the state is not plain JSON: {error}") from error
    except (StateCorrupt, StateMismatch) as error:
        raise StateError(f"the state cannot be written: {error.message}") from error
    if len(text) > MOST_BYTES:
        raise StateError(f"the header of the state takes {len(text)} bytes, at most {MOST_BYTES} are allowed")
    return text


def unseal(text: object) -> tuple[Header, dict[str, str]]:
    """Return the header and the digests of the tensors that a document holds.

    Raises:
        StateCorrupt: it is no document, it was changed, or a field is not valid; the message names it.
        StateMismatch: the format is newer than this version reads.
    """
    try:
        document = json.loads(text)  # type: ignore[arg-type]
        digest, digests = document.pop("digest"), document["digests"]
        intact = digest == digest_document(document) and isinstance(digests, dict)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise StateCorrupt(f"header: there is no state of protokv in it ({shown(error)})") from error
    if not intact:
        raise StateCorrupt("header: it is not the one that was saved")
    check_tensor_names(digests)
    return Header.from_json(document.get("header")), digests
