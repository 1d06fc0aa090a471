"""Random damage to states: each is refused in one line or loads equal, within limited memory.

`sealed` states have right digests, so only their meaning is wrong. They go through all that a user does: inspection,
a query, the next step and commit, conversion. A stage may refuse a state as corrupt or as not fitting; it must not fail
in another way, and a commit must load.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protokv.config import CONFIGS, MemoryConfig
from protokv.core.decoding import Decoding
from protokv.core.digest import NAMES, canonical, tensor_bytes, tensor_digest
from protokv.core.session import Session
from protokv.core.snapshot import State
from protokv.errors import StateCorrupt, StateError, StateMismatch
from protokv.inspection.states import convert, describe
from protokv.storage.api import load_state, read_header, save_state
from protokv.storage.checkpoint import from_state, to_state
from protokv.storage.form import FORMS
from tests.conftest import random_frames
from tests.storage.conftest import limited_memory
from tests.storage.mutations import change_document, joined, resealed, split, unzipped, zipped

SLOW = [pytest.mark.slow, pytest.mark.timeout(24 * 3600)]
SEED = int(os.environ.get("FUZZ_SEED", "0"))

NUMBERS = [0, 1, -1, 2, 3, 7, 2**15, 4_000_000, 2**24, 2**31, 2**40, 2**53, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3e38, -3e38, 1e308, float("nan"), float("inf"), -float("inf"), 2.0**24 + 2]
# Replacements for any value of a header.
STRANGE = [
    *NUMBERS, 2**32 - 1, 2**39, 2**63, 2**64, 10**30, 1e308, -0.5, None, True, "", "..", "../../../etc/passwd", "\x00",
    "\u202e", "F32", "U8", [], {}, [[]], [2**39], "0" * 64,
]  # fmt: skip


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


# Damaged bytes


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return these bytes after one to three accidents, most of them near the ends, where the structure is."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not data:
            return rng.randbytes(20)
        at = rng.choice((rng.randrange(len(data)), rng.randrange(400), -rng.randint(1, 300))) % len(data)
        n = rng.choice((1, 2, 4, 8, 30))
        match rng.randrange(7):
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
            case _:
                data = data[:at] + data[:60] + data[at:]
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


@pytest.mark.parametrize("suffix", FORMS)
@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=SLOW)])
def test_randomly_damaged_states_are_refused_or_load_equal(suffix, count, make_state, same_state, tmp_path):
    good, path, counts = tmp_path / f"good{suffix}", tmp_path / f"bad{suffix}", Counter[str]()
    state = make_state()
    save_state(state, good)
    load_state(good)
    with limited_memory(256 << 20, 64 << 10):
        for n in range(count):
            shutil.rmtree(path, ignore_errors=True)
            (shutil.copytree if good.is_dir() else shutil.copyfile)(good, path)
            sealed = damage(path, random.Random(f"{suffix} {SEED} {n}"))
            with contextlib.suppress(StateError):
                read_header(path)
            try:
                found = load_state(path)
            except StateError as error:
                counts["refused"] += "\n" not in error.message
            else:
                # A document that was sealed again is another state, not a damaged one.
                equal = same_state(found, state)
                assert equal or sealed, n
                counts["equal" if equal else "other"] += 1
    assert counts.total() == count
    assert counts["refused"] > count / 2
    assert counts["equal"] > 0


# Sealed states


def good_states(backbone: Any) -> list[State]:
    """Return a state of every memory after evictions, and two of empty memories."""
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
    header, tensors = json.loads(canonical(state.to_json())), dict(state.tensors)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        what = rng.random()
        if what < 0.35:
            # Mostly the memory and the clock; an earlier accident may have removed them.
            likely = [name for name in ("memory", "memory", "memory", "clock", "clock", "backbone") if name in header]
            alter_value(header, [*likely, *header], rng)
        elif what < 0.7:
            _alter_numbers(tensors, rng)
        else:
            _alter_form(tensors, rng)
    return header, tensors


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
    name, other = rng.choice(list(tensors)), rng.choice(list(tensors))
    tensor = tensors[name]
    axis = rng.randrange(max(1, tensor.dim()))
    match rng.randrange(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[rng.choice([name + "x", "near.extra", "x." + name, other])] = tensor
        case 2:
            tensors[name] = tensor.to(rng.choice(list(NAMES)))
        case 3 if tensor.dim():
            tensors[name] = tensor.narrow(axis, 0, rng.randrange(tensor.shape[axis] + 1)).contiguous()
        case 4 if tensor.dim():
            tensors[name] = torch.cat([tensor, tensor], axis)
        case 5:
            tensors[name] = rng.choice([tensor[None], tensor.reshape(-1), tensor.transpose(0, -1).contiguous()])
        case _:
            tensors[name], tensors[other] = tensors[other], tensor


def write_sealed(path: Path, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a `.safetensors` state of any header and tensors with right digests, without a check."""
    body, described, digests = b"", {}, {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        data, dtype = tensor_bytes(tensor.contiguous()), NAMES[tensor.dtype]
        offsets = [len(body), len(body) + len(data)]
        described[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        digests[name] = tensor_digest(dtype, tuple(tensor.shape), data)
        body += data.tobytes()
    document = resealed({"header": header, "digests": digests})
    path.write_bytes(joined(json.dumps({"__metadata__": {"protokv": canonical(document)}, **described}).encode(), body))


def use(path: Path, backbone: Any, same_state, suffix: str) -> Iterator[str]:
    """Do what a user does with a state; yield the outcome of every stage."""

    def query() -> None:
        from_state(load_state(path), backbone).ask("what is there?", Decoding(max_new_tokens=1))

    def ingest() -> None:
        target = path.with_name("next.safetensors")
        session = from_state(load_state(path), backbone)
        session.watch(random_frames(99))
        save_state(to_state(session), target)
        try:
            describe(target, values=True)
            from_state(load_state(target), backbone)
        except StateError as error:
            raise AssertionError("a commit does not load") from error

    def convert_and_back() -> None:
        there = path.with_name(f"there{suffix}")
        convert(path, there, overwrite=True)
        assert same_state(load_state(there), load_state(path))

    stages = {"inspect": lambda: describe(path, values=True), "query": query, "ingest": ingest}
    for name, stage in {**stages, "convert": convert_and_back}.items():
        try:
            stage()
        except (StateCorrupt, StateMismatch) as error:
            yield f"{name} refused" if "\n" not in error.message else "several lines"
        else:
            yield f"{name} done"


@pytest.mark.parametrize("count", [26, pytest.param(int(os.environ.get("FUZZ_STATES", "2000")), marks=SLOW)])
def test_altered_states_that_are_sealed_are_refused_or_work(count, tiny, same_state, tmp_path, monkeypatch):
    """`FUZZ_STATES` and `FUZZ_SEED` choose others; a hundred thousand take an hour on one core."""
    # This test needs no bytes on a disk.
    monkeypatch.setattr(os, "fsync", lambda number: None)
    states, path, outcomes = good_states(tiny), tmp_path / "hostile.safetensors", Counter[str]()
    # Import and allocate everything once before memory is limited.
    for suffix in (".pt", ".zarr"):
        write_sealed(path, states[-1].to_json(), dict(states[-1].tensors))
        assert all(outcome.endswith("done") for outcome in use(path, tiny, same_state, suffix))
    with limited_memory(1 << 30, 256 << 10):
        for n in range(count):
            header, tensors = altered(states[n % len(states)], random.Random(f"{SEED} {n}"))
            with contextlib.suppress(ValueError):
                write_sealed(path, header, tensors)
            outcomes.update(use(path, tiny, same_state, ".zarr" if n % 16 == 0 else ".pt"))
    for stage in ("inspect", "query", "ingest", "convert"):
        assert outcomes[f"{stage} refused"] + outcomes[f"{stage} done"] == count
        assert outcomes[f"{stage} done"] > count / 20
        assert stage == "convert" or outcomes[f"{stage} refused"] > count / 4
