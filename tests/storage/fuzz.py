"""States that somebody altered and sealed again, through all that a user does with a state.

    python -m tests.storage.fuzz SEED COUNT

In a process whose memory is limited, a state of every kind of memory is altered COUNT times: its header, the names,
shapes and dtypes of its tensors, their numbers. Its digests are right, so nothing but sense tells that it is hostile.
Each goes through inspect, verify, a query, the next step and commit, and conversion. A stage may refuse it as corrupt
or as not fitting; it may neither end in anything else, nor hang, nor take much memory; and what is committed must load.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from protokv import storage
from protokv.config import CONFIGS, MemoryConfig
from protokv.core.decoding import Decoding
from protokv.core.digest import NAMES, canonical, document_digest, raw, tensor_digest
from protokv.core.session import Session
from protokv.core.snapshot import State
from protokv.errors import StateCorrupt, StateMismatch
from protokv.inspection.describe import convert, describe
from protokv.storage.checkpoint import from_state, to_state
from tests.conftest import random_frames
from tests.storage.mutations import STRANGE

SMALL = {"subquantizers": 4, "codewords": 4, "warmup_residuals": 16}
MOST_SECONDS = 60
SPARE_BYTES = 1 << 30

NUMBERS = [0, 1, -1, 2, 3, 7, 2**15, 4_000_000, 2**24, 2**31, 2**40, 2**53, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3e38, -3e38, 1e308, float("nan"), float("inf"), -float("inf"), 2.0**24 + 2]


def memories() -> dict[str, MemoryConfig]:
    """One of every name."""
    made = {name: MemoryConfig.of(name, budget=24) for name in CONFIGS}
    return made | {"paper": made["paper"].with_fields(SMALL)}


def seeds(backbone: Any, folder: Path) -> list[State]:
    """A state of every memory that has evicted something, and of one that is empty."""
    found = []
    for name, config in memories().items():
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
    """Header and tensors after one to three accidents, each of which somebody could mean."""
    header = json.loads(canonical(state.to_json()))
    tensors = dict(state.tensors)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        what = rng.random()
        if what < 0.35:
            _alter_value(header, rng)
        elif what < 0.7:
            _alter_numbers(tensors, rng)
        else:
            _alter_form(tensors, rng)
    return header, tensors


def _alter_value(header: dict[str, Any], rng: random.Random) -> None:
    """One field, at any depth; mostly of the memory and the clock."""
    place: Any = header
    # An accident before this one may have taken a field away.
    likely = [name for name in ("memory", "memory", "memory", "clock", "clock", "backbone") if name in header]
    key: Any = rng.choice([*likely, *header])
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
    """Some elements of a tensor."""
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
    """A tensor's name, shape or dtype."""
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
    """A `.safetensors` state of any header and tensors, every digest right; nothing is checked."""
    body, described, digests = [], {}, {}
    begin = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        data, dtype = raw(tensor.contiguous()), NAMES[tensor.dtype]
        described[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
        body.append(data.tobytes())
        digests[name] = tensor_digest(dtype, tuple(tensor.shape), data)
    document = {"header": header, "digests": digests}
    document["digest"] = document_digest(document)
    head = json.dumps({"__metadata__": {"protokv": canonical(document)}, **described}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(body))


def _bits(state: State) -> object:
    tensors = {name: (t.dtype, t.shape, raw(t).tobytes()) for name, t in state.tensors.items()}
    return state.to_json(), tensors


class Stages:
    """What a user does with a state."""

    def __init__(self, backbone: Any, folder: Path) -> None:
        self.backbone, self.folder = backbone, folder
        self._session: Session | None = None

    def inspect(self, path: Path) -> None:
        """With --verify, which leaves nothing out that is done without."""
        self._session = None
        describe(path, values=True)

    def query(self, path: Path) -> None:
        self._session = from_state(storage.load_state(path), self.backbone)
        self._session.ask("what is there?", Decoding(max_new_tokens=1))

    def ingest(self, path: Path) -> None:
        """The next step and its commit, which must load and go on."""
        target = self.folder / "next.safetensors"
        session = self._session or from_state(storage.load_state(path), self.backbone)
        session.watch(random_frames(99))
        storage.save_state(to_state(session), target)
        try:
            describe(target, values=True)
            from_state(storage.load_state(target), self.backbone)
        except (StateCorrupt, StateMismatch) as error:
            raise AssertionError(f"what was committed does not load: {error.message}") from error

    def convert(self, path: Path, suffix: str = ".zarr") -> None:
        """To another form, bit for bit."""
        there = self.folder / f"there{suffix}"
        convert(path, there, overwrite=True)
        assert _bits(storage.load_state(there)) == _bits(storage.load_state(path))

    def all(self, n: int) -> Iterator[tuple[str, Callable[[Path], None]]]:
        """The stages of state `n`; one in sixteen is converted to a hierarchy, which takes far longer than a file."""
        yield from (("inspect", self.inspect), ("query", self.query), ("ingest", self.ingest))
        yield "convert", partial(self.convert, suffix=".zarr" if n % 16 == 0 else ".pt")


def run(stages: Stages, states: list[State], seed: int, count: int, only: int | None = None) -> dict[str, Any]:
    """Alter and use states; returns what became of them, by stage, and every failure that there may not be."""
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    path = stages.folder / "hostile.safetensors"
    for n in range(count) if only is None else [only]:
        rng = random.Random(f"{seed} {n}")
        header, tensors = altered(states[n % len(states)], rng)
        with contextlib.suppress(ValueError):
            write_sealed(path, header, tensors)
        for name, stage in stages.all(n):
            signal.alarm(MOST_SECONDS)
            try:
                stage(path)
            except (StateCorrupt, StateMismatch) as error:
                outcomes[f"{name} refused" if "\n" not in error.message else "several lines"] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                where = traceback.extract_tb(error.__traceback__)[-1]
                failures.append(
                    f"{seed} {n} {name}: {type(error).__name__}: {error} at {where.name}:{where.lineno}"[:400]
                )
            else:
                outcomes[f"{name} done"] += 1
    signal.alarm(0)
    return {"outcomes": dict(sorted(outcomes.items())), "failures": failures}


def main(seed: int, count: int, only: int | None = None) -> None:
    """Print what became of the states, as JSON."""
    import resource

    from protokv.backbones import load_backbone
    from tests.backbones.tiny import write_qwen2_5_vl
    from tests.peak import peak_kib

    torch.set_num_threads(1)

    def hung(*_: object) -> None:
        raise TimeoutError("it hangs")

    signal.signal(signal.SIGALRM, hung)
    # Whether bytes reach a disk is not the question here.
    os.fsync = lambda number: None
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if os.access(in_memory, os.W_OK) else None) as name:
        folder = Path(name)
        backbone = load_backbone(str(write_qwen2_5_vl(folder / "model")), device="cpu", dtype="float32")
        states, stages = seeds(backbone, folder), Stages(backbone, folder)
        # Everything is imported and allocated once before memory is limited.
        for state in states:
            write_sealed(folder / "good.safetensors", state.to_json(), dict(state.tensors))
            for n in (0, 1):
                for _, stage in stages.all(n):
                    stage(folder / "good.safetensors")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        before = peak_kib()
        result = run(stages, states, seed, count, only)
        result["grown_mib"] = (peak_kib() - before) >> 10
    os.write(1, json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
