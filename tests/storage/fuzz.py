"""Random damage to states, in a process with limited memory.

    python -m tests.storage.fuzz bytes SEED COUNT
    python -m tests.storage.fuzz sealed SEED COUNT

`bytes` damages files of every form, and what is inside of them, and loads them. It stops if code was run.
`sealed` alters header and tensors of a state of every memory, with right digests, so that only their meaning is wrong.
Each state goes through all that a user does: inspect, query, the next step and commit, conversion. A stage may refuse
it as corrupt or as not fitting. It must not fail in another way, hang, or take much memory, and what it commits must
load. Both print counts as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from protokv.backbones import load_backbone
from protokv.config import CONFIGS, MemoryConfig
from protokv.core.decoding import Decoding
from protokv.core.digest import NAMES, canonical, raw, tensor_digest
from protokv.core.session import Session
from protokv.core.snapshot import State
from protokv.errors import StateCorrupt, StateError, StateMismatch
from protokv.inspection.convert import convert
from protokv.inspection.describe import describe
from protokv.storage.api import load_state, read_header, save_state
from protokv.storage.checkpoint import from_state, to_state
from protokv.storage.form import FORMS
from tests.backbones.tiny import write_qwen2_5_vl
from tests.conftest import random_frames
from tests.peak import peak_kib
from tests.storage.conftest import make, same
from tests.storage.mutations import change_document, joined, resealed, split, unzipped, zipped

# Values that take the place of any value of a header.
STRANGE = [
    0, 1, -1, 2**15, 2**31, 2**32 - 1, 2**39, 2**40, 2**62, 2**63, 2**64, 10**30, 1e308, -0.5, None, True, "", "..",
    "../../../etc/passwd", "\x00", "\u202e", "F32", "U8", [], {}, [[]], [2**39], "0" * 64,
]  # fmt: skip


# Damaged bytes


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return these bytes after one to three accidents."""
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


def damage(path: Path, rng: random.Random) -> bool:
    """Damage a state of any form in place. Return True if its document was sealed again."""
    if rng.random() < 0.25:
        with contextlib.suppress(ValueError, TypeError):
            change_document(lambda document: alter_value(document, list(document), rng))(path)
        return True
    if path.suffix == ".safetensors" and rng.random() < 0.3:
        head, body = split(path.read_bytes())
        alter_value(head, list(head), rng)
        path.write_bytes(joined(json.dumps(head).encode(), body))
    elif path.suffix == ".pt" and rng.random() < 0.5:
        members = unzipped(path.read_bytes())
        name = rng.choice(["archive/data.pkl", *members])
        path.write_bytes(zipped({**members, name: damaged(members[name], rng)}))
    else:
        files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
        file = rng.choice(files)
        file.write_bytes(damaged(file.read_bytes(), rng))
    return False


def load_damaged(suffix: str, seed: int, count: int) -> dict[str, int]:
    """Damage a state `count` times and load it; anything but a StateError or the state itself ends the process."""
    counts = {"refused": 0, "equal": 0, "other": 0}
    with tempfile.TemporaryDirectory() as name:
        good, path = Path(name, f"good{suffix}"), Path(name, f"bad{suffix}")
        save_state(make(), good)
        for n in range(count):
            shutil.rmtree(path, ignore_errors=True)
            (shutil.copytree if good.is_dir() else shutil.copyfile)(good, path)
            sealed = damage(path, random.Random(f"{suffix} {seed} {n}"))
            signal.alarm(20)
            with contextlib.suppress(StateError):
                read_header(path)
            try:
                found = load_state(path)
            except StateError as error:
                counts["refused"] += "\n" not in error.message
            else:
                # A document that was sealed again is another state, not a damaged one.
                equal = same(found, make())
                assert equal or sealed, f"{suffix} {seed} {n}: something else was loaded"
                counts["equal" if equal else "other"] += 1
    signal.alarm(0)
    return counts


def fuzz_bytes(seed: int, count: int) -> dict[str, Any]:
    """Load damaged states of every form."""
    for suffix in FORMS:
        load_damaged(suffix, -1, 3)

    def stop(event: str, arguments: tuple[Any, ...]) -> None:
        """End the process at an event that only code in a file could cause."""
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class"):
            os.write(2, f"{event} {arguments}\n".encode())
            os._exit(3)

    before = limit_memory(256 << 20)
    sys.addaudithook(stop)
    counts = {suffix: load_damaged(suffix, seed, count) for suffix in FORMS}
    return {"counts": counts, "grown_mib": (peak_kib() - before) >> 10}


# Sealed states


MOST_SECONDS = 60
NUMBERS = [0, 1, -1, 2, 3, 7, 2**15, 4_000_000, 2**24, 2**31, 2**40, 2**53, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3e38, -3e38, 1e308, float("nan"), float("inf"), -float("inf"), 2.0**24 + 2]


def good_states(backbone: Any) -> list[State]:
    """Return a state of every memory that has evicted something, and of two that are empty."""
    found = []
    for name in CONFIGS:
        config = MemoryConfig.of(name, budget=24)
        if name == "paper":
            config = config.with_fields({"subquantizers": 4, "codewords": 4, "warmup_residuals": 16})
        session = Session.start(backbone, config, fps=2.0)
        for index in range(8):
            if index == 0 and name in ("paper", "full"):
                found.append(_detached(to_state(session)))
            session.watch(random_frames(index))
        found.append(_detached(to_state(session, source={"name": "a.mp4", "fingerprint": "f"})))
    return found


def _detached(state: State) -> State:
    return replace(state, tensors={name: tensor.detach().clone() for name, tensor in state.tensors.items()})


def altered(state: State, rng: random.Random) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return header and tensors after one to three accidents, each of which somebody could mean."""
    header = json.loads(canonical(state.to_json()))
    tensors = dict(state.tensors)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        what = rng.random()
        if what < 0.35:
            # Mostly the memory and the clock; an accident before this one may have removed them.
            likely = [name for name in ("memory", "memory", "memory", "clock", "clock", "backbone") if name in header]
            alter_value(header, [*likely, *header], rng)
        elif what < 0.7:
            _alter_numbers(tensors, rng)
        else:
            _alter_form(tensors, rng)
    return header, tensors


def alter_value(document: dict[str, Any], keys: list[str], rng: random.Random) -> None:
    """Alter one value of a JSON document, at any depth below one of these keys."""
    place: Any = document
    key: Any = rng.choice(keys)
    while isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.95:
        place = place[key]
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    old = place[key]
    if isinstance(place, dict) and rng.random() < 0.05:
        del place[key]
    elif isinstance(old, (int, float)) and not isinstance(old, bool) and rng.random() < 0.6:
        place[key] = rng.choice([old + 1, old - 1, old * 2, old // 2, -old, *NUMBERS, 1e300, 3e38, 0.5])
    elif key == "kind" and rng.random() < 0.6:
        place[key] = rng.choice(list(CONFIGS))
    else:
        place[key] = rng.choice(STRANGE)


def _alter_numbers(tensors: dict[str, torch.Tensor], rng: random.Random) -> None:
    """Alter some elements of a tensor."""
    name = rng.choice(list(tensors))
    tensor = tensors[name].clone()
    if not tensor.numel():
        return
    flat = tensor.view(-1)
    at = slice(None) if rng.random() < 0.2 else rng.randrange(flat.numel())
    if tensor.dtype == torch.bool:
        flat[at] = rng.random() < 0.5
    elif tensor.is_floating_point():
        flat[at] = torch.tensor(rng.choice(FLOATS), dtype=torch.float64).to(tensor.dtype)
    else:
        limits = torch.iinfo(tensor.dtype)
        near = [int(flat[0]) + 1, int(flat[-1]) - 1]
        flat[at] = rng.choice([n for n in (*NUMBERS, *near) if limits.min <= n <= limits.max])
    if rng.random() < 0.1:
        flat.copy_(flat.flip(0))
    tensors[name] = tensor


def _alter_form(tensors: dict[str, torch.Tensor], rng: random.Random) -> None:
    """Alter a tensor's name, shape or dtype."""
    name = rng.choice(list(tensors))
    tensor = tensors[name]
    match rng.randrange(8):
        case 0:
            del tensors[name]
        case 1:
            tensors[rng.choice([name + "x", "near.extra", "x." + name, *tensors])] = tensor
        case 2:
            tensors[name] = tensor.to(rng.choice(list(NAMES)))
        case 3 | 4:
            if tensor.dim():
                axis = rng.randrange(tensor.dim())
                tensors[name] = tensor.narrow(axis, 0, rng.randrange(tensor.shape[axis] + 1)).contiguous()
        case 5:
            if tensor.dim():
                tensors[name] = torch.cat([tensor, tensor], rng.randrange(tensor.dim()))
        case 6:
            tensors[name] = rng.choice(
                [tensor[None], tensor.reshape(-1), tensor.t().contiguous() if tensor.dim() == 2 else tensor]
            )
        case _:
            other = rng.choice(list(tensors))
            tensors[name], tensors[other] = tensors[other], tensor


def write_sealed(path: Path, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a `.safetensors` state of any header and tensors, every digest right; nothing is checked."""
    body, described, digests = [], {}, {}
    begin = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        data, dtype = raw(tensor.contiguous()), NAMES[tensor.dtype]
        described[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
        body.append(data.tobytes())
        digests[name] = tensor_digest(dtype, tuple(tensor.shape), data)
    document = resealed({"header": header, "digests": digests})
    head = {"__metadata__": {"protokv": canonical(document)}, **described}
    path.write_bytes(joined(json.dumps(head).encode(), b"".join(body)))


class Stages:
    """What a user does with a state."""

    def __init__(self, backbone: Any, folder: Path) -> None:
        self.backbone, self.folder = backbone, folder
        self._session: Session | None = None

    def inspect(self, path: Path) -> None:
        self._session = None
        describe(path, values=True)

    def query(self, path: Path) -> None:
        self._session = from_state(load_state(path), self.backbone)
        self._session.ask("what is there?", Decoding(max_new_tokens=1))

    def ingest(self, path: Path) -> None:
        """Watch the next step and commit it; the commit must load."""
        target = self.folder / "next.safetensors"
        session = self._session or from_state(load_state(path), self.backbone)
        session.watch(random_frames(99))
        save_state(to_state(session), target)
        try:
            describe(target, values=True)
            from_state(load_state(target), self.backbone)
        except (StateCorrupt, StateMismatch) as error:
            raise AssertionError(f"what was committed does not load: {error.message}") from error

    def convert(self, path: Path, suffix: str) -> None:
        """Write another form, bit for bit."""
        there = self.folder / f"there{suffix}"
        convert(path, there, overwrite=True)
        assert same(load_state(there), load_state(path))

    def all(self, n: int) -> Iterator[tuple[str, Callable[[Path], None]]]:
        """Yield the stages of state `n`; one in sixteen is converted to a hierarchy, which takes far longer."""
        yield from (("inspect", self.inspect), ("query", self.query), ("ingest", self.ingest))
        yield "convert", lambda path: self.convert(path, ".zarr" if n % 16 == 0 else ".pt")


def fuzz_sealed(seed: int, count: int) -> dict[str, Any]:
    """Alter and use states; return what became of them by stage, and every other failure."""

    def hung(*_: object) -> None:
        raise TimeoutError("it hangs")

    signal.signal(signal.SIGALRM, hung)
    # Whether bytes reach a disk is not the question here.
    os.fsync = lambda number: None
    in_memory = Path("/dev/shm")
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=in_memory if os.access(in_memory, os.W_OK) else None) as name:
        folder = Path(name)
        backbone = load_backbone(str(write_qwen2_5_vl(folder / "model")), device="cpu", dtype="float32")
        states, stages, path = good_states(backbone), Stages(backbone, folder), folder / "hostile.safetensors"
        # Import and allocate everything once before memory is limited.
        for n, state in enumerate(states):
            write_sealed(path, state.to_json(), dict(state.tensors))
            for _, stage in stages.all(n):
                stage(path)
        before = limit_memory(1 << 30)
        for n in range(count):
            header, tensors = altered(states[n % len(states)], random.Random(f"{seed} {n}"))
            with contextlib.suppress(ValueError):
                write_sealed(path, header, tensors)
            for what, stage in stages.all(n):
                signal.alarm(MOST_SECONDS)
                try:
                    stage(path)
                except (StateCorrupt, StateMismatch) as error:
                    outcomes[f"{what} refused" if "\n" not in error.message else "several lines"] += 1
                except Exception as error:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    text = f"{type(error).__name__}: {error} at {where.name}:{where.lineno}"
                    failures.append(f"{seed} {n} {what}: {text}"[:400])
                else:
                    outcomes[f"{what} done"] += 1
        signal.alarm(0)
    return {"outcomes": outcomes, "failures": failures, "grown_mib": (peak_kib() - before) >> 10}


def limit_memory(spare_bytes: int) -> int:
    """Allow this process as many more bytes; return the peak so far in KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return peak_kib()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fuzz = {"bytes": fuzz_bytes, "sealed": fuzz_sealed}[sys.argv[1]]
    os.write(1, json.dumps(fuzz(*map(int, sys.argv[2:]))).encode() + b"\n")
