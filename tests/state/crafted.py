"""Files of states that no program of ours writes: changed heads and documents, with digests that fit them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protokv.state.digest import canonical_json, digest_document

Json = dict[str, Any]


def split(data: bytes) -> tuple[Json, bytes]:
    """Return the head of a .safetensors file and the bytes behind it."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(head: Json | bytes, body: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + body


def resealed(document: Json) -> Json:
    """Return a document with the digest that fits it."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    return {**rest, "digest": digest_document(rest)}


def change_head(path: Path, change: Callable[[Json], object]) -> None:
    """Change the head of a .safetensors file; `change` gets it."""
    head, body = split(path.read_bytes())
    change(head)
    path.write_bytes(joined(head, body))


def change_document(path: Path, change: Callable[[Json], object]) -> None:
    """Change the document of a .safetensors file and seal it again."""

    def inside(head: Json) -> None:
        document = json.loads(head["__metadata__"]["protokv"])
        change(document)
        head["__metadata__"]["protokv"] = canonical_json(resealed(document))

    change_head(path, inside)
