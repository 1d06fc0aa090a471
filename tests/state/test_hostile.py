"""Damaged and hostile states: one StateError each, no code run, no memory beyond the file's size."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protokv.core.session import Session
from protokv.core.step import MOST_COUNT
from protokv.errors import StateCorrupt, StateError
from protokv.memories import CONFIGS, DurableConfig, MemoryConfig, PaperConfig
from protokv.state.api import load_state, read_header, save_state
from protokv.state.checkpoint import from_state, to_state
from protokv.state.describe import convert, describe
from protokv.state.form import FORMS
from protokv.state.snapshot import State
from tests.conftest import random_frames
from tests.state.mutations import MUTATIONS, RAN, change_document, claim, joined, split

GOLDEN = Path(__file__).parent / "golden" / "v1-paper.safetensors"


@pytest.fixture(scope="module")
def good(make_state, tmp_path_factory) -> dict[str, Path]:
    """A state in every form, by suffix."""
    folder = tmp_path_factory.mktemp("good")
    for suffix in FORMS:
        save_state(make_state(), folder / f"a{suffix}")
    return {suffix: folder / f"a{suffix}" for suffix in FORMS}


def copied(good: dict[str, Path], suffix: str, folder: Path) -> Path:
    path = folder / f"a{suffix}"
    (shutil.copytree if good[suffix].is_dir() else shutil.copyfile)(good[suffix], path)
    return path


@contextmanager
def little_memory(limit: int = 8 << 20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("suffix", "name"), [(suffix, name) for suffix, table in MUTATIONS.items() for name in table])
def test_a_hostile_state_is_refused_in_one_line_without_code_or_memory(suffix, name, good, tmp_path):
    mutation, path = MUTATIONS[suffix][name], copied(good, suffix, tmp_path)
    mutation.change(path)
    with little_memory(), pytest.raises(mutation.error, match=mutation.match) as caught:
        load_state(path)
    assert caught.value.message.isprintable()
    # The header alone may be fine; no other error may come.
    with suppress(StateError):
        read_header(path)
    if "metadata" in name:
        with pytest.raises(StateCorrupt):
            load_state(path, verify=False)
    assert not RAN.exists()


def test_a_newer_state_names_the_version_that_wrote_it(good, tmp_path):
    path = copied(good, ".safetensors", tmp_path)
    MUTATIONS[".safetensors"]["newer"].change(path)
    with pytest.raises(StateError) as caught:
        read_header(path)
    assert "protokv 9.1" in caught.value.hint


def test_changes_without_a_meaning_load_equal(good, make_state, same_state, tmp_path):
    """So the mutations above are refused for their content, and not for how they are made."""
    for suffix in FORMS:
        path = copied(good, suffix, tmp_path)
        change_document(lambda document: None)(path)
        assert same_state(load_state(path), make_state())
    path = tmp_path / "a.zarr"
    change_document(lambda document: document["digests"].update({"bank/mass/c.9": "0" * 32}))(path)
    assert same_state(load_state(path), make_state())
    path = tmp_path / "a.safetensors"
    head, body = split(path.read_bytes())
    twice = json.dumps(head)[:-1] + f', "offset": {json.dumps(head["offset"])}}}'
    path.write_bytes(joined(twice.encode(), body))
    assert same_state(load_state(path), make_state())
    claim(tmp_path / "b.pt")
    assert load_state(tmp_path / "b.pt").tensors["a"].equal(torch.zeros(4))


@pytest.mark.parametrize("suffix", FORMS)
def test_a_flipped_bit_in_a_tensor_is_found_and_the_tensor_named(suffix, make_state, tmp_path):
    state, path = make_state(tensors={"bank.mass": torch.full((9,), 3.0), "b": torch.zeros(4)}), tmp_path / f"a{suffix}"
    needle = state.tensors["bank.mass"].numpy().tobytes()
    save_state(state, path)
    (file,) = [p for p in ([path] if path.is_file() else path.rglob("c.0")) if needle in p.read_bytes()]
    data = file.read_bytes()
    for at in range(data.index(needle), data.index(needle) + len(needle), 5):
        file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(StateCorrupt, match=r"tensor bank\.mass"):
            load_state(path)
        # Without verification the changed bytes are returned.
        assert not load_state(path, verify=False).tensors["bank.mass"].equal(state.tensors["bank.mass"])


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_every_cut_of_a_file_is_refused_even_without_digests(suffix, good, tmp_path):
    data, path = good[suffix].read_bytes(), tmp_path / f"a{suffix}"
    for size in [*range(0, len(data), 97), *range(len(data) - 9, len(data))]:
        path.write_bytes(data[:size])
        with pytest.raises(StateError):
            load_state(path, verify=False)


def test_loading_takes_no_more_memory_than_the_file_has_bytes(make_state, tmp_path):
    path = tmp_path / "a.safetensors"
    save_state(make_state(tensors={"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20, dtype=torch.bool)}), path)
    with little_memory(path.stat().st_size + (64 << 10)):
        load_state(path)


# What `inspect --verify` promises


MEMORIES = {kind: MemoryConfig.of(kind, budget=24) for kind in CONFIGS} | {
    "near only": PaperConfig(budget=24).with_fields({"split": (1, 0)}),
    "durable, blocked": DurableConfig(budget=24, rule="blocked"),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_every_state_of_a_stream_passes(name, tiny, tmp_path):
    session, path = Session.start(tiny, MEMORIES[name], fps=2.0), tmp_path / "a.safetensors"
    for seed in range(8):
        if seed in (0, 1, 6, 7):
            save_state(to_state(session), path)
            found = describe(path, values=True)["verified"]
        session.watch(random_frames(seed))
    assert [line.split(":")[0] for line in found[:3]] == ["bytes", "memory", "clock"]


@pytest.mark.parametrize("name", ["paper", "durable", "sliding-window"])
def test_a_stream_of_many_days_passes(name, tiny, tmp_path):
    """Beyond 2**24, float32 does not hold every position."""
    path, later = tmp_path / "a.safetensors", 2**24 + 1
    session = Session.start(tiny, MEMORIES[name], fps=2.0)
    for seed in range(6):
        session.watch(random_frames(seed))
    state = to_state(session)
    moved = {n: t + later for n, t in state.tensors.items() if n in ("near.positions", "bank.position")}
    clock = replace(state.clock, next_position=state.clock.next_position + later)
    save_state(replace(state, tensors={**state.tensors, **moved}, clock=clock), path)
    describe(path, values=True)
    again = to_state(from_state(load_state(path), tiny))
    assert again.tensors["near.positions"].max() == clock.next_position - 1
    assert all(again.tensors[one].equal(tensor) for one, tensor in moved.items())


@pytest.mark.filterwarnings("ignore::protokv.errors.PositionWarning")
@pytest.mark.parametrize("field", ["steps", "tokens_seen"])
def test_a_stream_at_the_end_of_what_a_state_can_count_leaves_none_that_does_not_load(field, tiny, tmp_path):
    session = Session.start(tiny, MEMORIES["sliding-window"], fps=2.0)
    session.watch(random_frames(0))
    session.clock = replace(session.clock, **{field: MOST_COUNT - 1})
    session.watch(random_frames(1))
    with pytest.raises(StateCorrupt, match="end of what a state can count"):
        to_state(session)


Change = Callable[[State], State]


def tensor(name: str, change: Callable[[torch.Tensor], object]) -> Change:
    def apply(state: State) -> State:
        one = state.tensors[name].clone()
        changed = change(one)
        # A change in place returns the tensor or nothing.
        return replace(state, tensors={**state.tensors, name: changed if isinstance(changed, torch.Tensor) else one})

    return apply


def put(name: str, *at: int, value: float) -> Change:
    return tensor(name, lambda one: one.__setitem__(at, value))


def clock(**fields: object) -> Change:
    return lambda state: replace(state, clock=replace(state.clock, **fields))


# Each is refused with a message that names the tensor or field.
LIES: dict[str, tuple[Change, str]] = {
    "masses with fractions": (tensor("bank.mass", lambda t: t.double()), "bank.mass"),
    "ring of another size": (put("near.ring", 1, value=99), "near.ring"),
    "clock without steps": (clock(steps=0), "clock|step"),
    "clock without tokens": (clock(tokens_seen=0), "clock"),
    "fewer tokens than steps": (clock(tokens_seen=3), "clock.tokens_seen"),
    "no stream time": (clock(stream_time_s=0.0), "clock"),
    "source in the future": (lambda s: replace(s, source={"first_step": 99}), "source.first_step"),
    "other kind of memory": (lambda s: replace(s, memory={**s.memory, "kind": "full"}), "memory|tensor|field|setting"),
    "tensor left out": (
        lambda s: replace(s, tensors={n: t for n, t in s.tensors.items() if n != "bank.mean"}),
        "bank.mean",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_state_that_no_stream_leaves_is_refused_with_the_tensor(lie, tmp_path):
    change, name = LIES[lie]
    # The digests are right.
    save_state(change(load_state(GOLDEN)), tmp_path / "a.safetensors")
    with pytest.raises(StateCorrupt, match=name):
        describe(tmp_path / "a.safetensors", values=True)
    with pytest.raises(StateCorrupt, match=name):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
