"""Random damage to states: each is refused in one line or loads equal, within limited memory.

`sealed` states have right digests, so only their meaning is wrong. They go through all that a user does: inspection,
a query, the next step and commit, conversion. A stage may refuse a state as corrupt or as not fitting; it must not fail
in another way, and a commit must load.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.core.decoding import Decoding
from protokv.core.session import Session
from protokv.errors import PositionWarning, StateCorrupt, StateError, StateMismatch
from protokv.ingestion.continuation import check_memory
from protokv.memories import CONFIGS, MemoryConfig
from protokv.state.api import load_state, read_header, save_state
from protokv.state.checkpoint import admit, from_state, to_state
from protokv.state.describe import convert, describe
from protokv.state.digest import NAMES, canonical, tensor_bytes, tensor_digest
from protokv.state.form import FORMS
from protokv.state.snapshot import State
from protokv.state.thumbnails import Thumbnails, shrink
from protokv.state.watched import Gap, WallClockLog, next_segment
from protokv.video import Damage
from protokv.words.transcript import Transcript
from tests.conftest import random_frames
from tests.state.conftest import limited_memory, same
from tests.state.mutations import change_document, joined, resealed, split, unzipped, zipped

SLOW = [pytest.mark.slow, pytest.mark.timeout(24 * 3600)]
SEEDS = os.environ.get("FUZZ_SEED", "0").partition("-")
SEED = int(SEEDS[0])

NUMBERS = [0, 1, -1, 2, 3, 7, 2**15, 4_000_000, 2**24, 2**31, 2**40, 2**53, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3e38, -3e38, 1e308, float("nan"), float("inf"), -float("inf"), 2.0**24 + 2]
# Replacements for any value of a header.
STRANGE = [
    *NUMBERS, 2**32 - 1, 2**39, 2**48 - 1, 2**63, 2**64, 10**30, 10**400,
    1e308, -0.5, None, True, "", "..", "../../../etc/passwd", "\x00",
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

SMALL = {"subquantizers": 4, "codewords": 4, "warmup_residuals": 16}
# Every memory, and the settings that hold other tensors.
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: SMALL if name == "paper" else {} for name in CONFIGS},
    "durable with float centres": {"center_bits": 32, "positions": "compact"},
    "durable with words": {"words": True, "words_share": 0.5},
    "durable, blocked": {"rule": "blocked", "recent_frames": 2},
    "sliding-window with recent frames": {"recent_frames": 4},
}


def good_states(backbone: Any) -> list[State]:
    """Return a state of every memory after evictions, with its thumbnails, and two of empty memories."""
    found = []
    live = {**msgspec.to_builtins(WallClockLog(anchors=[(0.0, 1.7e9)], gaps=[Gap(1.0, 2.0, "why")])), "gaps_in_all": 1}
    source = {"name": "a.mp4", "fingerprint": "f", "duration_s": 9.5, "first_step": 0, "start_s": 0.0, "earlier": []}
    source |= {"live": live, "damage": asdict(Damage(frames_lost=3, message="lost")), "decoders": {"pyav": 8}}
    for name, settings in SETTINGS.items():
        config = MemoryConfig.of(re.split(" |,", name)[0], budget=24).with_fields(settings)
        session = Session.start(backbone, config, fps=2.0, attachments=[Transcript()])
        if name in ("paper", "full"):
            found.append(_detached(to_state(session)))
        thumbnails = Thumbnails(4)
        session.attachments.append(thumbnails)
        for index in range(8):
            frames = random_frames(index)
            thumbnails.add(index, session.clock.stream_time_s, shrink(frames[0]))
            session.watch(frames, words=("What?",) * ("words" in name))
        found.append(_detached(to_state(session, source=source)))
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


def write_sealed(path: Path, header: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a `.safetensors` state of any header and tensors with right digests, without a check."""
    parts, described, digests, end = [], {}, {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        data, dtype = tensor_bytes(tensor.contiguous()), NAMES[tensor.dtype]
        described[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + len(data)]}
        digests[name] = tensor_digest(dtype, tuple(tensor.shape), data)
        parts.append(data.tobytes())
        end += len(data)
    document = canonical(resealed({"header": header, "digests": digests}))
    head = json.dumps({"__metadata__": {"protokv": document}, **described}).encode()
    path.write_bytes(joined(head, b"".join(parts)))


Make = Callable[[], tuple[dict[str, Any], Mapping[str, torch.Tensor]]]


class User:
    """Does with states all that a user does, and counts the verdict of every stage: done, corrupt or mismatch.

    Any other error comes out.
    """

    def __init__(self, folder: Path, backbone: Any) -> None:
        self.path, self._next, self._backbone = folder / "hostile.safetensors", folder / "next.safetensors", backbone
        self.states = good_states(backbone)
        self._tokens: Any = None
        self._random = random.Random(SEED)
        self.verdicts: Counter[str] = Counter()

    def use(self, name: str, make: Make, form: str | None = None) -> dict[str, str]:
        """Seal the state that `make` returns and use it. With a form, commit to a file, and convert there and back."""
        try:
            header, tensors = make()
            write_sealed(self.path, header, tensors)
        except ValueError:
            # JSON has no NaN: no document, no state.
            return {}
        try:
            found = self._use(form)
            # Whatever an inspection refuses, all refuse; a model may refuse more.
            assert found.get("inspect", "done") == "done" or "done" not in found.values(), found
        except BaseException as error:
            error.add_note(name)
            raise
        self.verdicts.update(f"{stage} {verdict}" for stage, verdict in found.items())
        return found

    def _use(self, form: str | None) -> dict[str, str]:
        # Each command but a conversion begins like this.
        opened = self._verdict(lambda: self._load(self.path))
        found = dict.fromkeys(("inspect", "query", "ingest"), opened)
        if opened == "done":
            found["query"] = self._verdict(self._query)
            found["ingest"] = self._verdict(lambda: self._ingest(form)) if found["query"] == "done" else found["query"]
            # The slowest stage; most of it is what a query does.
            if form is not None or self._random.random() < 0.1:
                found["inspect"] = self._verdict(lambda: describe(self.path, values=True))
            else:
                del found["inspect"]
        if form is not None:
            found["convert"] = self._verdict(lambda: self._convert(self.path.with_name(f"there{form}")))
        return found

    @staticmethod
    def _verdict(stage: Callable[[], object]) -> str:
        try:
            stage()
        except (StateCorrupt, StateMismatch) as error:
            verdict = "corrupt" if isinstance(error, StateCorrupt) else "mismatch"
            return verdict if error.message.isprintable() else "unprintable"
        return "done"

    def _load(self, path: Path) -> None:
        self._state = load_state(path, admit=admit)

    def _query(self) -> None:
        self._session = from_state(self._state, self._backbone)
        self._session.ask("what is there?", Decoding(max_new_tokens=1))

    def _ingest(self, form: str | None) -> None:
        session = self._session
        next_segment(self._state)
        check_memory(self.path, self._state, session.config)
        if self._tokens is None:
            self._tokens = session.embed(random_frames(99), 0.0)
        session.take([self._tokens], [session.clock.stream_time_s])
        state = to_state(session)
        try:
            if form is not None:
                save_state(state, self._next)
                state = load_state(self._next, admit=admit)
            from_state(state, self._backbone)
        except StateError as error:
            raise AssertionError("a commit does not load") from error

    def _convert(self, there: Path) -> None:
        convert(self.path, there, overwrite=True)
        assert same(load_state(there), load_state(self.path))


Change = tuple[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], object]]


def extremes(state: State) -> Iterator[Change]:
    """Yield a name and a change in place of header and tensors for every number of a state at every extreme.

    Of a tensor the first element, the last one and all of them.
    """
    for name, tensor in state.tensors.items():
        if tensor.numel():
            for value, (where, at) in product(_extremes_of(tensor.dtype), ENDS.items()):
                yield f"{where} {name} = {value}", partial(_put_number, name, value, at)
    for keys, value in product(_leaves(state.to_json()), STRANGE):
        yield f"{keys} = {str(value)[:30]}", partial(_put_field, keys, value)


def _put_number(name: str, value: float, at: slice, _: object, tensors: dict[str, torch.Tensor]) -> None:
    tensors[name] = tensors[name].clone()
    number = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    tensors[name].view(-1)[at] = number.to(tensors[name].dtype)


def _put_field(keys: list[Any], value: Any, header: dict[str, Any], _: object) -> None:
    place: Any = header
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value


def changed(state: State, changes: Iterable[Change]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return header and tensors after these changes."""
    header, tensors = json.loads(canonical(state.to_json())), dict(state.tensors)
    for _, change in changes:
        change(header, tensors)
    return header, tensors


ENDS = {"first": slice(0, 1), "last": slice(-1, None), "every": slice(None)}


def _extremes_of(dtype: torch.dtype) -> list[Any]:
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_floating_point:
        most = torch.finfo(dtype).max
        return [*(one for one in FLOATS if not abs(one) > most or math.isinf(one)), most, -most]
    limits = torch.iinfo(dtype)
    return [limits.min, limits.max, *(one for one in NUMBERS if limits.min < one < limits.max)]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[list[Any]]:
    """Yield the path of every plain value in a JSON document, and of every empty list or object."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from _leaves(inner, (*path, key))
    if not inside:
        yield list(path)


@pytest.fixture(scope="module")
def user(tmp_path_factory, tiny) -> Iterator[User]:
    """A user with limited memory."""
    made = User(tmp_path_factory.mktemp("user"), tiny)
    states = made.states
    with warnings.catch_warnings():
        # Positions of a long stream; a user sees a note.
        warnings.simplefilter("ignore", PositionWarning)
        # Import and allocate everything once before memory is limited.
        for form in (".pt", ".zarr"):
            made.use(form, lambda: (states[-1].to_json(), states[-1].tensors), form)
        assert {one.partition(" ")[2] for one in made.verdicts} == {"done"}
        yield made


COUNT = int(os.environ.get("FUZZ_STATES", "2000"))
# What may be allocated, and by how much the peak may grow, in a few thousand uses: safetensors 0.8 loses two numbers,
# 64 bytes, with every tensor that it loads, which is 7 KB a use.
LIMIT = (1 << 30, 256 << 10)


@pytest.mark.parametrize("count", [26, pytest.param(COUNT, marks=SLOW)])
def test_altered_states_that_are_sealed_are_refused_or_work(count, user):
    """`FUZZ_STATES` and `FUZZ_SEED` choose others; the seed may be several, as in 1-40."""
    seeds = range(SEED, int(SEEDS[2] or SEED) + 1)
    for seed in seeds:
        with limited_memory(*LIMIT):
            for n in range(count):
                state, rng = user.states[n % len(user.states)], random.Random(f"{seed} {n}")
                user.use(f"seed {seed}, number {n}", partial(altered, state, rng), {0: ".zarr", 13: ".pt"}.get(n % 26))
    for stage in ("query", "ingest"):
        assert user.verdicts[f"{stage} done"] > count / 20
        assert user.verdicts[f"{stage} corrupt"] > count / 4


@given(data=st.data())
def test_numbers_of_a_state_at_extremes_are_refused_or_work(user, data):
    state = data.draw(st.sampled_from(user.states))
    changes = data.draw(st.lists(st.sampled_from(list(extremes(state))), min_size=1, max_size=3))
    user.use(", ".join(name for name, _ in changes), partial(changed, state, changes))


@pytest.mark.slow
@pytest.mark.timeout(24 * 3600)
def test_every_number_of_a_state_at_every_extreme_is_refused_or_works(user):
    for state in user.states:
        with limited_memory(*LIMIT):
            for change in extremes(state):
                user.use(change[0], partial(changed, state, [change]))
    assert not {one.partition(" ")[2] for one in user.verdicts} - {"done", "corrupt", "mismatch"}
