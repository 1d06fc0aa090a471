"""Sign a state: an act of those who pass it on, and of no commit."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING

from protokv.state import signatures
from protokv.state.checkpoint import admit
from protokv.state.describe import check_whole
from protokv.state.form import StatePath, form_of

if TYPE_CHECKING:
    from minisign import SecretKey


def sign(path: StatePath, key: SecretKey) -> dict[str, str]:
    """Sign the bytes of a whole state; return `state` and `signature`, the paths of both.

    A later commit, a conversion and each kept commit need signatures of their own.

    Raises:
        StateError: the state is missing or damaged, no key that is trusted has signed it (`trusting`), or the signature
            cannot be written.
    """
    form = form_of(path, to_read=True)
    trusted, messages = form.guard, list[bytes]()

    def keep(name: str, message: bytes, signature: bytes | None) -> None:
        if trusted is not None:
            trusted(name, message, signature)
        messages.append(message)

    form.guard = keep
    check_whole(form.read(admit=admit))
    name = PurePath(os.fspath(path)).name
    return {"state": str(path), "signature": form.write_signature(signatures.sign(key, name, messages[-1]))}
