"""What is not signed by a trusted key is refused before it is opened, and what is loaded is what was signed."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import ConfigError, StateCorrupt, StateUntrusted
from protokv.state import signatures
from protokv.state.api import load_state, moments, read_header, read_thumbnails, save_state, stored_bytes
from protokv.state.files import PtForm, SafetensorsForm
from protokv.state.form import FORMS
from protokv.state.signatures import trusting
from protokv.state.signing import sign
from protokv.state.zarr import ZarrForm
from tests.state.golden.make import FOLDER

minisign = pytest.importorskip("minisign")
EVERY_FORM = pytest.mark.parametrize("suffix", sorted(FORMS))
READS = (load_state, read_header, read_thumbnails, stored_bytes, moments)


class Keys:
    """A pair of keys, and a file with the public one."""

    def __init__(self, folder: Path, name: str) -> None:
        pair = minisign.KeyPair.generate()
        self.secret, self.public, self.file = pair.secret_key, pair.public_key, folder / f"{name}.pub"
        self.file.write_bytes(bytes(pair.public_key) + b"\n")


@pytest.fixture
def mine(tmp_path: Path) -> Keys:
    return Keys(tmp_path, "mine")


@pytest.fixture
def other(tmp_path: Path) -> Keys:
    return Keys(tmp_path, "other")


@pytest.fixture
def state(suffix: str, tmp_path: Path) -> Path:
    path = tmp_path / f"a{suffix}"
    save_state(load_state(FOLDER / "v1-sliding-window.safetensors"), path)
    return path


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is opened as a state."""

    def opened(*_: Any) -> Any:
        raise AssertionError("opened")

    for form in (SafetensorsForm, PtForm):
        monkeypatch.setattr(form, "map", opened)
    monkeypatch.setattr(ZarrForm, "open", opened)
    monkeypatch.setattr("protokv.state.zarr.Hierarchy", opened)


def refused(path: Path, keys: Keys, match: str | None = None) -> None:
    for read in READS:
        with trusting(keys.file), pytest.raises(StateUntrusted, match=match):
            read(path)


def files(path: Path) -> list[Path]:
    return [one for one in (path, *sorted(path.rglob("*"))) if one.is_file()]


@EVERY_FORM
def test_a_signed_state_is_read_and_every_other_is_refused(suffix: str, state: Path, mine: Keys, other: Keys) -> None:
    refused(state, mine, r"is not signed: there is no .*a\.\w+\.minisig")
    assert sign(state, mine.secret)["signature"] == f"{state}.minisig"
    link = state.with_name(f"link{suffix}")
    link.symlink_to(state)
    with trusting(mine.file):
        assert [load_state(one).to_json() for one in (state, link)] == [load_state(state).to_json()] * 2
        for read in READS:
            read(state)
    refused(state, other, "which is not in")
    both = other.file.with_name("both.pub")
    both.write_bytes(b"# of us both\n\n" + other.file.read_bytes() + mine.public.to_base64() + b"\n")
    with trusting(both):
        load_state(state)
    # A byte of any file, and a commit.
    for file in files(state):
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with trusting(mine.file), pytest.raises(StateUntrusted, match="has changed since it was signed"):
            read_header(state)
        file.write_bytes(data)
    save_state(load_state(FOLDER / "v1-durable.safetensors"), state)
    refused(state, mine, "has changed since it was signed")


@pytest.mark.usefixtures("unopened")
@EVERY_FORM
def test_nothing_is_opened_before_its_signature_is_checked(suffix: str, tmp_path: Path, mine: Keys) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".zarr":
        path.mkdir()
    (path / "zarr.json" if suffix == ".zarr" else path).write_bytes(b"hostile")
    refused(path, mine, "is not signed")


@EVERY_FORM
def test_what_is_loaded_is_what_was_checked(
    suffix: str, state: Path, mine: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody overwrites the state in place right after its signature was checked, and turns the clock back."""
    sign(state, mine.secret)
    signed, guard_of = load_state(state), signatures._guard_of

    def guard(path: Path) -> signatures.Guard:
        def check_and_overwrite(*arguments: Any) -> None:
            check(*arguments)
            for file in files(state):
                status = file.stat()
                with file.open("r+b") as same:
                    same.write(bytes(status.st_size))
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

        check = guard_of(path)
        return check_and_overwrite

    monkeypatch.setattr(signatures, "_guard_of", guard)
    with trusting(mine.file):
        found = load_state(state)
    assert found.to_json() == signed.to_json()
    assert all(found.tensors[name].equal(one) for name, one in signed.tensors.items())
    with pytest.raises(StateCorrupt):
        load_state(state)


def test_a_changed_signature_is_refused(tmp_path: Path, mine: Keys, other: Keys) -> None:
    path, twin = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for name, one in (("v1-durable", path), ("v1-paper", twin)):
        shutil.copy(FOLDER / f"{name}.safetensors", one)
        sign(one, mine.secret)
    file = tmp_path / "a.safetensors.minisig"
    good = file.read_bytes()
    told, line, trusted, last, end = good.split(b"\n")
    other_line = bytes(other.secret.sign(path.read_bytes())).split(b"\n")[1]
    changed = {
        "of another state": twin.with_name("b.safetensors.minisig").read_bytes(),
        "trailing bytes": good + b"x",
        "a line more": good + good,
        "empty": b"",
        "cut": good[:-20],
        "no text": bytes(range(256)),
        "endless": good + b"\n" * (1 << 20),
        "trusted comment": b"\n".join((told, line, trusted + b" and more", last, end)),
        "another's name of the key": b"\n".join((told, other_line[:12] + line[12:], trusted, last, end)),
        "another's signature": b"\n".join((told, other_line, trusted, last, end)),
        # This one signs the hash as if it were the state.
        "not hashed": bytes(mine.secret.sign(path.read_bytes(), prehash=False)),
    }
    # The last letter has bits that stand for nothing.
    for n in range(0, len(line) - 2, 7):
        flipped = bytearray(line)
        flipped[n] = ord("B") if flipped[n] == ord("A") else ord("A")
        changed[f"letter {n}"] = b"\n".join((told, bytes(flipped), trusted, last, end))
    accepted = []
    for what, data in changed.items():
        file.write_bytes(data)
        with trusting(mine.file), suppress(StateUntrusted):
            load_state(path)
            accepted.append(what)
    assert not accepted
    # Nobody signs the first comment, and nobody reads it.
    file.write_bytes(good.replace(told, b"untrusted comment: \x1b[31mtrust me"))
    with trusting(mine.file):
        load_state(path)
    file.unlink()
    file.mkdir()
    refused(path, mine, "is not signed")


def test_a_hierarchy_signs_what_b2sum_prints_and_no_key_looks_like_two(tmp_path: Path, mine: Keys) -> None:
    path = tmp_path / "a.zarr"
    shutil.copytree(FOLDER / "v1-sliding-window.zarr", path)
    sign(path, mine.secret)
    lines = [f"{hashlib.blake2b(one.read_bytes()).hexdigest()}  {one.relative_to(path)}\n" for one in files(path)]
    signature = minisign.Signature.from_file(f"{path}.minisig")
    mine.public.verify("".join(sorted(lines, key=lambda one: one[130:])).encode(), signature)
    (path / "more").write_bytes(b"")
    refused(path, mine, "has changed")
    (path / "more").rename(path / f"a\n{lines[0][:128]}  b")
    with trusting(mine.file), pytest.raises(StateCorrupt, match="belongs to no tensor"):
        load_state(path)


@pytest.mark.parametrize(
    "damaged", [b"", b"untrusted comment: none\n", b"RWQ\n", b"\xff\xfe", None, "secret", "signature"]
)
def test_a_file_without_keys_trusts_nothing(damaged: bytes | str | None, tmp_path: Path, mine: Keys) -> None:
    if damaged == "secret":
        damaged = bytes(mine.secret)
    elif damaged == "signature":
        damaged = bytes(mine.secret.sign(b""))
    if damaged is None:
        mine.file.unlink()
    else:
        mine.file.write_bytes(bytes(damaged))
    with pytest.raises(ConfigError) as caught, trusting(mine.file):
        raise AssertionError("something is trusted")
    assert str(mine.file) in caught.value.message
    assert mine.secret.to_base64().decode()[8:] not in caught.value.message


def test_a_kept_commit_needs_a_signature_of_its_own(tmp_path: Path, mine: Keys) -> None:
    path, kept = tmp_path / "a.safetensors", tmp_path / "a.safetensors@000014.000s"
    shutil.copy(FOLDER / "v1-paper.safetensors", path)
    shutil.copy(path, kept)
    sign(path, mine.secret)
    with trusting(mine.file):
        assert moments(path) == [14.0]
        with pytest.raises(StateUntrusted, match="is not signed"):
            load_state(kept)
    sign(kept, mine.secret)
    with trusting(mine.file):
        load_state(kept)


def test_a_damaged_state_is_not_signed(tmp_path: Path, mine: Keys) -> None:
    path = tmp_path / "a.safetensors"
    data = (FOLDER / "v1-paper.safetensors").read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(StateCorrupt):
        sign(path, mine.secret)
    assert not Path(f"{path}.minisig").exists()
