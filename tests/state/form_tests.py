"""The tests of every form of a state. A form's test file subclasses `FormTests` and chooses the places of states."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protokv.core.step import StreamClock
from protokv.errors import StateCorrupt, StateError, StateLocked, StateNotFound
from protokv.state.api import check_target, load_state, moments, read_header, save_state, stored_bytes
from protokv.state.writer import Writer

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip

shapes = st.lists(st.integers(0, 5), max_size=4)
words = st.from_regex(r"[a-zA-Z0-9_-]{1,8}", fullmatch=True)
names = st.lists(words, min_size=1, max_size=3).map(".".join)


@st.composite
def tensors(draw):
    """Draw any bits, so NaNs, infinities and subnormals too."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=dtype).reshape(shape)
    size = count * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    return torch.tensor(list(data), dtype=torch.uint8).view(dtype).reshape(shape)


def apart(made: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drop tensors whose name is that of another, in any case, or of a group that holds another."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in made.items():
        one = name.lower() + "."
        if not any(one.startswith(other.lower() + ".") or (other.lower() + ".").startswith(one) for other in found):
            found[name] = tensor
    return found


def moment(make_state, step: int, **changes):
    """Return the state of a stream at a step of two seconds; its tensors differ from step to step."""
    return make_state(seed=step, clock=StreamClock(step, 2.0 * step, 9 * step, 9 * step, 1.0, 2), **changes)


def overtaken(path, meanwhile, state) -> None:
    """Call `meanwhile` between opening a writer and its commit."""
    with Writer(path) as writer:
        meanwhile()
        writer.commit(state, wait=True)


UNREADABLE = [
    ({"memory": {"rate": float("inf")}}, "JSON"),
    ({"settings": {"what": object()}}, "JSON"),
    ({"tensors": {"z": torch.zeros(2, dtype=torch.complex64)}}, "tensor z"),
    ({"settings": {"long": "x" * (5 << 20)}}, "bytes"),
    ({"tensors": {"../z": torch.zeros(2)}}, "not a name"),
    ({"tensors": {"": torch.zeros(2)}}, "not a name"),
    ({"tensors": {"a..b": torch.zeros(2)}}, "not a name"),
    ({"tensors": {"a": torch.zeros(2), "A": torch.zeros(2)}}, "not a name"),
    ({"tensors": {"a": torch.zeros(2), "a.b": torch.zeros(2)}}, "a group"),
]


class FormTests:
    """A subclass gives the fixture `at`: a function that returns a new place for a state at every call."""

    @pytest.fixture
    def at(self, tmp_path):
        numbers = itertools.count()

        def place():
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            return folder / f"a{self.suffix}"

        return place

    suffix = ""

    def test_every_dtype_comes_back_bit_for_bit_with_its_header(self, at, make_state, same_state):
        whole, path = torch.arange(24).reshape(2, 3, 4), at()
        made = {f"all.{dtype}".replace("torch.", ""): whole.to(dtype) for dtype in DTYPES}
        made |= {"none": torch.empty(3, 0, 2), "scalar": torch.tensor(7.5), "truth": torch.tensor(True)}
        made |= {"odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]), "void": torch.empty(0)}
        state = make_state(tensors=made, complete=True)
        save_state(state, path)
        found = load_state(path)
        assert same_state(found, state)
        assert (found.backbone, found.clock, found.complete) == (state.backbone, state.clock, True)
        assert same_state(load_state(path, verify=False), state)
        assert read_header(path).to_json() == state.to_json()

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(made=st.dictionaries(names, tensors(), max_size=4).map(apart))
    def test_any_tensors_under_any_names_come_back_bit_for_bit(self, made, at, make_state, same_state):
        state, path = make_state(tensors=made), at()
        save_state(state, path)
        assert same_state(load_state(path), state)

    def test_views_and_shared_storages_come_back_apart_and_may_be_written_to(self, at, make_state):
        whole, path = torch.arange(60.0).reshape(3, 4, 5), at()
        made = {"a": whole.transpose(0, 2), "b": whole[:, 1], "c": whole, "d": whole, "e": whole[:1].expand(3, 4, 5)}
        save_state(make_state(tensors=made), path)
        found = load_state(path).tensors
        assert all(found[name].equal(tensor) and found[name].is_contiguous() for name, tensor in made.items())
        found["c"].zero_()
        assert found["d"].equal(whole)
        assert load_state(path).tensors["c"].equal(whole)

    def test_a_missing_state_is_not_found_and_a_saved_one_has_its_bytes(self, at, make_state):
        path = at()
        for read in (load_state, read_header, stored_bytes, moments, lambda path: load_state(path, at_s=9.0)):
            with pytest.raises(StateNotFound, match="no state at"):
                read(path)
        check_target(path)
        save_state(make_state(), path)
        check_target(path)
        assert stored_bytes(path) > sum(t.nbytes for t in make_state().tensors.values())

    def test_an_unreadable_state_is_not_written(self, at, make_state, same_state):
        nothing, path = at(), at()
        save_state(make_state(), path)
        for change, match in UNREADABLE:
            for place in (nothing, path):
                with pytest.raises(StateError, match=match):
                    save_state(make_state(**change), place)
        with pytest.raises(StateNotFound):
            load_state(nothing)
        assert same_state(load_state(path), make_state())

    def test_one_of_two_writers_commits_and_the_other_is_refused(self, at, make_state, same_state):
        path = at()
        save_state(moment(make_state, 1), path)
        with Writer(path) as first:
            assert first.locked
            with pytest.raises(StateLocked):
                overtaken(path, lambda: first.commit(moment(make_state, 2), wait=True), moment(make_state, 3))
            first.commit(moment(make_state, 4), wait=True)
        assert same_state(load_state(path), moment(make_state, 4))
        with Writer(path) as later:
            (committed,) = later.commit(moment(make_state, 5), wait=True)
        assert committed.file_bytes == stored_bytes(path)

    @pytest.mark.parametrize("keep", [1, 3])
    def test_the_last_commits_are_kept_and_found_by_their_time(self, keep, at, make_state, same_state):
        path = at()
        with Writer(path, keep=keep) as writer:
            for step in (2, 5, 9, 14):
                writer.commit(moment(make_state, step), wait=True)
        there = [2, 5, 9, 14][-keep:]
        assert moments(path) == [2.0 * step for step in there]
        for step in there:
            for asked in (2.0 * step + 3, 2.0 * step - 4e-4):
                assert same_state(load_state(path, at_s=asked), moment(make_state, step))
        listed = ", ".join(f"{2 * step} s" for step in there)
        with pytest.raises(StateNotFound, match=f"no commit at or before 3 s; it has those at {listed}") as caught:
            load_state(path, at_s=3.0)
        assert "--keep" in caught.value.hint

    def test_without_keep_no_commit_is_kept_or_removed(self, at, make_state):
        path = at()
        with Writer(path, keep=3) as writer:
            for step in (1, 2, 3):
                writer.commit(moment(make_state, step), wait=True)
        with Writer(path) as writer:
            for step in (4, 5):
                writer.commit(moment(make_state, step), wait=True)
        assert moments(path) == [2.0, 4.0, 10.0]

    def test_readers_beside_a_writer_only_ever_see_whole_states(self, at, make_state, same_state):
        path = at()
        states = [make_state(seed=seed) for seed in range(4)]
        save_state(states[0], path)
        wrong, done = [], threading.Event()

        def read() -> None:
            while not done.is_set():
                try:
                    found = load_state(path)
                except StateError as error:
                    wrong.append(error)
                else:
                    wrong.extend([] if any(same_state(found, state) for state in states) else [found])

        reader = threading.Thread(target=read)
        reader.start()
        with Writer(path) as writer:
            for n in range(8):
                writer.commit(replace(states[n % 4]), wait=True)
        done.set()
        reader.join()
        assert not wrong


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of a file, or of every file in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return {str(one.relative_to(path)): one.read_bytes() for one in files if one.is_file()}


class LocalFormTests(FormTests):
    """A form in the file system."""

    def test_the_same_state_gives_the_same_bytes_in_any_order(self, at, make_state):
        state, (a, b, c) = make_state(), (at(), at(), at())
        reordered = replace(
            state, tensors=dict(reversed(state.tensors.items())), memory=dict(reversed(state.memory.items()))
        )
        save_state(state, a)
        save_state(reordered, b)
        save_state(load_state(a), c)
        assert contents(a) == contents(b) == contents(c)

    def test_a_link_to_itself_is_corrupt_and_a_name_that_is_too_long_is_not_found(self, at, make_state):
        path = at()
        path.symlink_to(path.name)
        for read in (load_state, read_header, stored_bytes):
            with pytest.raises(StateCorrupt, match="leads to itself"):
                read(path)
        for name in ("x" * 300, "x" * 5000):
            with pytest.raises(StateNotFound):
                load_state(path.parent / f"{name}{self.suffix}")

    @pytest.mark.parametrize("length", [208, 255])
    def test_a_name_too_long_for_temporary_names_fails_before_the_work(self, length, at):
        path = at().parent / f"{'x' * (length - len(self.suffix))}{self.suffix}"
        with pytest.raises(StateError, match="its name takes more than 207 bytes") as caught, Writer(path):
            pass
        assert caught.value.hint == "choose a shorter name"
        assert not list(path.parent.iterdir())

    def test_the_longest_name_leaves_room_for_kept_commits(self, at, make_state):
        path = at().parent / f"{'x' * (207 - len(self.suffix))}{self.suffix}"
        with Writer(path, keep=2) as writer:
            for step in (1, 2, 3):
                writer.commit(moment(make_state, step), wait=True)
        assert moments(path) == [4.0, 6.0]
