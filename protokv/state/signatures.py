"""Detached signatures in the form of minisign, for those who pass states on.

`STATE.minisig` beside a state signs the bytes that a reader reads: of a file all of its bytes, so that
`minisign -Vm STATE` checks it too; of a hierarchy (`.zarr`, Icechunk) what `b2sum` prints of its objects, sorted by
key. XXH3 digests alone would not do: anybody can make other bytes with the same digest.

Within `trusting`, every read of this process first takes all bytes of a state into memory, checks their signature, and
then opens these bytes: nothing can be changed in between, and nothing is opened that is not signed.
https://jedisct1.github.io/minisign/
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protokv.errors import ConfigError, StateCorrupt, StateError, StateUntrusted, shown
from protokv.machine import memory_bytes

if TYPE_CHECKING:
    from minisign import PublicKey, SecretKey

SUFFIX = ".minisig"

# A signature takes at most 9 KiB; of a longer file, the end is missing, and it is refused.
LIMIT_BYTES = 16 << 10
_KEYS_LIMIT_BYTES = 1 << 20

# Keys of tensors. Others could look like several lines.
_KEY = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")

Guard = Callable[[str, bytes, bytes | None], None]
"""Called with the name of a state, the bytes that are signed and the signature; raises StateUntrusted to refuse it."""

_guard: Guard | None = None


def current_guard() -> Guard | None:
    """Return what guards every read of this process; None: nothing does."""
    return _guard


@contextmanager
def trusting(keys: Path | None) -> Iterator[None]:
    """Read only states that one of the public keys in this file has signed, in all threads; with None, any state.

    Raises:
        ConfigError: there is no key, or something that is none; or the library for signatures is not installed.
    """
    global _guard
    before = _guard
    _guard = before if keys is None else _guard_of(keys)
    try:
        yield
    finally:
        _guard = before


def read_secret_key(path: Path, ask: Callable[[], str]) -> SecretKey:
    """Return the secret key in a file of `minisign -G`; `ask` returns its password if it has one.

    Raises:
        ConfigError: the file cannot be read or holds no such key, or the password is wrong.
    """
    minisign = _library()
    try:
        key: SecretKey = minisign.SecretKey.from_bytes(_read(path))
        if key.is_encrypted():
            key.decrypt(ask())
    except ValueError as error:
        raise ConfigError(f"cannot sign with {path}: {error}", hint="`minisign -G` makes a pair of keys") from error
    return key


def sign(key: SecretKey, name: str, message: bytes) -> bytes:
    """Return the file of a signature; it names the state for people."""
    told = re.sub(r"[^ -~]", "?", name)[:200]
    return bytes(key.sign(message, trusted_comment=f"state:{told}")) + b"\n"


def statement(contents: Mapping[str, bytes]) -> bytes:
    """Return the bytes that are signed of a hierarchy.

    Raises:
        StateCorrupt: a key is not one that a tensor can have.
    """
    for key in contents:
        if not _KEY.fullmatch(key):
            raise StateCorrupt(f"{shown(key)} belongs to no tensor")
    return "".join(f"{hashlib.blake2b(contents[key]).hexdigest()}  {key}\n" for key in sorted(contents)).encode()


def check_fits_memory(size: int) -> None:
    """Raise StateError if so many bytes are more than the memory of this machine; sparse files can claim any size."""
    if (most := memory_bytes()) is not None and size > most:
        raise StateError(f"the state has {size} bytes, this machine has {most} bytes of memory")


def _guard_of(path: Path) -> Guard:
    keys = _read_keys(path)
    minisign = _library()

    def check(name: str, message: bytes, signature: bytes | None) -> None:
        again = f"sign what you trust with `protokv inspect {name} --sign KEY`; its key must be in {path}"
        if signature is None:
            raise StateUntrusted(f"{name} is not signed: there is no {name}{SUFFIX}", hint=again)
        try:
            found = minisign.Signature.from_bytes(signature)
        except ValueError as error:
            raise StateUntrusted(f"{name}{SUFFIX} is no signature: {shown(error)}", hint=again) from error
        ours = [key for key in keys if _id_of(key.to_base64()) == _id_of(bytes(found).splitlines()[1])]
        if not ours:
            signer = _id_of(bytes(found).splitlines()[1])
            raise StateUntrusted(f"{name} is signed by the key {signer}, which is not in {path}", hint=again)
        # The other kind signs bytes that a longer message may have as its hash.
        if not (found.is_prehashed() and any(_is_valid(key, message, found) for key in ours)):
            what = "it has changed since it was signed, or the signature is of another state"
            raise StateUntrusted(f"{name} is not what was signed: {what}", hint=again)

    return check


def _is_valid(key: PublicKey, message: bytes, signature: Any) -> bool:
    try:
        key.verify(message, signature)
    except ValueError:
        return False
    return True


def _id_of(line: bytes) -> str:
    """Return the identifier of the key in a line of base64, as `minisign` writes it."""
    return f"{int.from_bytes(base64.b64decode(line)[2:10], 'little'):016X}"


def _read_keys(path: Path) -> list[PublicKey]:
    minisign, keys = _library(), []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip() and not line.startswith((b"untrusted comment:", b"#")):
            try:
                keys.append(minisign.PublicKey.from_base64(line.strip()))
            except ValueError as error:
                what = f"line {number} of {path} is no public key of minisign"
                raise ConfigError(what, hint="it is a line of 56 letters that begins with RW") from error
    if not keys:
        raise ConfigError(
            f"there is no key in {path}, so no state would be trusted", hint="put public keys of minisign there"
        )
    return keys


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_KEYS_LIMIT_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}", hint="name a file of minisign") from error


def _library() -> Any:
    try:
        import minisign
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", hint="pip install 'protokv[sign]'") from None
    return minisign
