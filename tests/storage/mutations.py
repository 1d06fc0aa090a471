"""Damage to states, of every form: bytes of files, what is inside of files, and documents that are sealed again.

Run as a program it damages, loads and counts in a process whose memory is limited, so that neither a large allocation
nor code that was run goes unnoticed: `python -m tests.storage.mutations SUFFIX SEED COUNT`.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from protokv.core.digest import canonical, document_digest

HUGE = [0, 1, -1, 2**15, 2**31, 2**32 - 1, 2**39, 2**40, 2**62, 2**63, 2**64, 10**30, 1e308, -0.5]
STRANGE = [
    *HUGE,
    None,
    True,
    "",
    "..",
    "../../../etc/passwd",
    "\x00",
    "\u202e",
    "F32",
    "U8",
    [],
    {},
    [[]],
    [2**39],
    "0" * 64,
]


class Dice(random.Random):
    """Random numbers, and whether they led to a document that was sealed again."""

    sealed = False


def damaged(data: bytes, rng: random.Random) -> bytes:
    """These bytes after one to three accidents."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not data:
            return rng.randbytes(20)
        # Heads and tails are where the structure is.
        at = rng.choice(
            (rng.randrange(len(data)), rng.randrange(min(len(data), 400)), -rng.randint(1, min(len(data), 300)))
        )
        at %= len(data)
        n = rng.choice((1, 2, 4, 8, 30))
        match rng.randrange(9):
            case 0 | 1:
                data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 2:
                data = data[:at]
            case 3:
                data = data[:at] + rng.randbytes(n) + data[at:]
            case 4:
                data = data[:at] + data[at + n :]
            case 5:
                data = data[:at] + rng.choice((b"\xff", b"\x00", b"\x7f")) * n + data[at + n :]
            case 6:
                data = data[:at] + rng.randbytes(n) + data[at + n :]
            case 7:
                other = rng.randrange(len(data))
                data = data[:at] + data[other : other + 60] + data[at:]
            case _:
                data += data[at : at + 200]
    return data


def altered(value: Any, rng: random.Random) -> Any:
    """A JSON value, one place of which holds something else, is gone, or stands in another's place."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.08:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.08:
            return {**value, rng.choice(list(value)) + rng.choice(("", "x")): value[key]}
        return {**value, key: altered(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at + 1 :]
        if rng.random() < 0.2:
            return [*value, value[at]]
        return [*value[:at], altered(value[at], rng), *value[at + 1 :]]
    return rng.choice(STRANGE)


def resealed(document: dict[str, Any]) -> dict[str, Any]:
    """A document whose digest is right, whatever it says."""
    rest = {k: v for k, v in document.items() if k != "digest"}
    return {**rest, "digest": document_digest(rest)}


def zipped(members: dict[str, bytes]) -> bytes:
    """A zip file of stored members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def unzipped(data: bytes) -> dict[str, bytes]:
    """Its members."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _altered_text(text: str, rng: Dice) -> str:
    try:
        made = canonical(resealed(altered(json.loads(text), rng)))
        rng.sealed = True
        return made
    except (ValueError, TypeError, AttributeError):
        return text[: len(text) // 2]


def _safetensors_inside(data: bytes, rng: Dice) -> bytes:
    length = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + length])
    if rng.random() < 0.5:
        outer["__metadata__"]["protokv"] = _altered_text(outer["__metadata__"]["protokv"], rng)
    else:
        outer = altered(outer, rng)
    head = json.dumps(outer).encode()
    return len(head).to_bytes(8, "little") + head + data[8 + length :]


def _zarr_inside(root: bytes, rng: Dice) -> bytes:
    group = json.loads(root)
    if rng.random() < 0.8:
        group["attributes"]["protokv"] = json.loads(
            _altered_text(json.dumps(group["attributes"]["protokv"]), rng) or "0"
        )
    else:
        group = altered(group, rng)
    return json.dumps(group).encode()


def _zip_inside(data: bytes, rng: Dice) -> bytes:
    members = unzipped(data)
    if "archive/data.pkl" in members and rng.random() < 0.2:
        content = torch.load(io.BytesIO(data), weights_only=True)
        content["protokv"] = _altered_text(content["protokv"], rng)
        out = io.BytesIO()
        torch.save(content, out)
        return out.getvalue()
    name = "archive/data.pkl" if "archive/data.pkl" in members and rng.random() < 0.6 else rng.choice(list(members))
    match rng.randrange(8):
        case 0:
            del members[name]
        case 1:
            members[rng.choice(("../x", "/etc/x", name.upper(), name + "x", "", "a" * 60000))] = members[name]
        case 2:
            other = rng.choice(list(members))
            members[name], members[other] = members[other], members[name]
        case _:
            members[name] = damaged(members[name], rng)
    return zipped(members)


def damage_file(data: bytes, suffix: str, rng: Dice) -> bytes:
    """A state of one file, damaged outside or inside."""
    if rng.random() < 0.5:
        return damaged(data, rng)
    return _safetensors_inside(data, rng) if suffix == ".safetensors" else _zip_inside(data, rng)


def damage_folder(folder: Path, rng: Dice) -> None:
    """A state in a folder, damaged in place."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    path = folder / "zarr.json" if rng.random() < 0.4 else rng.choice(files)
    match rng.randrange(10):
        case 0:
            path.unlink()
        case 1:
            path.unlink()
            path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", "..", "loop", str(rng.choice(files)))))
        case 2:
            path.unlink()
            os.mkfifo(path)
        case 3:
            path.unlink()
            path.mkdir()
        case 4:
            other = rng.choice(files)
            one, two = path.read_bytes(), other.read_bytes()
            path.write_bytes(two)
            other.write_bytes(one)
        case 5:
            with path.open("r+b") as file:
                file.truncate(rng.choice((0, 10, 1 << 43)))
        case 6 | 7:
            try:
                (folder / "zarr.json").write_bytes(_zarr_inside((folder / "zarr.json").read_bytes(), rng))
            except ValueError:
                path.write_bytes(b"")
        case _:
            path.write_bytes(damaged(path.read_bytes(), rng))


def run(suffix: str, seed: int, count: int, check: Callable[[Any], bool]) -> dict[str, int]:
    """Damage a state `count` times and load it; anything but a StateError or the state itself ends it."""
    from protokv.errors import StateError
    from protokv.storage.api import load_state, read_header, save_state
    from tests.storage.conftest import make

    counts = {"refused": 0, "equal": 0, "other": 0}
    with tempfile.TemporaryDirectory() as name:
        good, path = Path(name, f"good{suffix}"), Path(name, f"bad{suffix}")
        save_state(make(), good)
        data = good.read_bytes() if good.is_file() else b""
        for n in range(count):
            rng = Dice(f"{suffix} {seed} {n}")
            if data:
                path.write_bytes(damage_file(data, suffix, rng))
            else:
                shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(good, path)
                damage_folder(path, rng)
            for read in (load_state, read_header):
                signal.alarm(20)
                try:
                    found = read(path)
                except StateError as error:
                    counts["refused"] += read is load_state and "\n" not in error.message
                else:
                    if read is load_state:
                        # Who seals a document again has made another state, not damaged one.
                        equal = check(found)
                        assert equal or rng.sealed, f"{suffix} {seed} {n}: something else was loaded"
                        counts["equal" if equal else "other"] += 1
    signal.alarm(0)
    return counts


def _limited(extra_bytes: int) -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A file of a terabyte is one with a hole; writing one is an accident.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(seed: int, count: int, suffixes: list[str]) -> None:
    """Print what was counted, as JSON; any event that only code from a file could cause ends it."""
    from tests.peak import peak_kib
    from tests.storage.conftest import make, same

    torch.set_num_threads(1)
    for suffix in suffixes:
        run(suffix, -1, 3, lambda found: same(found, make()))
    before = peak_kib()
    _limited(256 << 20)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in (
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "os.posix_spawn",
            "pickle.find_class",
            "socket.connect",
        ):
            os.write(2, f"{event} {arguments}\n".encode())
            os._exit(3)

    sys.addaudithook(hook)
    result = {suffix: run(suffix, seed, count, lambda found: same(found, make())) for suffix in suffixes}
    grown = peak_kib() - before
    print(json.dumps({"counts": result, "grown_kib": grown}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
