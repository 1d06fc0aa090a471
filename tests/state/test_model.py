"""States in a folder behave as a model in memory says, whatever is done to them in whatever order.

The model knows of each path which commit of an uninterrupted run it holds, which earlier ones are kept, and who writes
it. Every state, past or present, must equal that commit bit for bit. Watching is cut off at any system call: by SIGKILL
or by an error of the disk, in a forked child (`tests.faults`).
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protokv.errors import StateError, StateLocked, StateMismatch, StateNotFound
from protokv.ingestion import Commit, Every, ingest
from protokv.memories import MemoryConfig
from protokv.state.api import load_state, moments
from protokv.state.checkpoint import load
from protokv.state.describe import convert
from protokv.state.form import FORMS, form_of
from protokv.state.snapshot import State
from protokv.state.writer import Writer
from tests import faults
from tests.faults import KILL, Fault
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.state.conftest import same

VIDEOS = {"A": Prepared(1, 6), "B": Prepared(2, 3)}
CONFIG = MemoryConfig.of("sliding-window", budget=40)
EXAMPLES = int(os.environ.get("PROTOKV_MODEL_EXAMPLES", "100"))

paths = st.sampled_from([f"{name}{suffix}" for name, suffix in zip("abc", FORMS, strict=True)] + ["d.safetensors"])
keeps = st.sampled_from([None, 1, 2, 3])
# Two streams: each is both videos, in one order or the other.
streams = st.sampled_from(["AB", "BA"])


def watch(path: Path, video: str, most: int | None = None, **options: Any) -> int:
    """Watch a video, commit after every step, stop after `most` commits, and return their number."""
    commits = 0
    events = ingest(
        VIDEOS[video], path, CONFIG, backbone=MockBackbone(), every=Every(n_steps=1), thumbnails=0, **options
    )
    for event in events:
        commits += isinstance(event, Commit)
        if commits == most:
            events.close()
    return commits


@dataclass(frozen=True)
class At:
    """A commit of a stream, by its number in a run that nothing interrupts."""

    stream: str
    index: int

    @property
    def state(self) -> State:
        return _commits(self.stream)[self.index]

    @property
    def video(self) -> str:
        """The video that the state is in, or at the end of."""
        return self.stream[len((self.state.source or {}).get("earlier", ()))]

    @property
    def time_s(self) -> float:
        return self.state.clock.stream_time_s

    def is_before(self, other: At) -> bool:
        return self.stream == other.stream and self.time_s < other.time_s


@cache
def _commits(stream: str) -> list[State]:
    found: list[State] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, video in enumerate(stream):
            path = Path(folder, "a.safetensors")
            for event in ingest(
                VIDEOS[video], path, CONFIG, backbone=MockBackbone(), every=Every(n_steps=1), thumbnails=0, append=i > 0
            ):
                if isinstance(event, Commit):
                    found.append(load_state(path))
    return found


@cache
def _answer(at: At) -> str:
    with tempfile.TemporaryDirectory() as folder:
        with Writer(Path(folder, "a.safetensors")) as writer:
            writer.commit(at.state, wait=True)
        return load(Path(folder, "a.safetensors"), MockBackbone()).ask("what is first ?").text


@dataclass
class Place:
    """What one path holds: the current state, the kept ones by their times, and a writer that is open."""

    now: At | None = None
    kept: dict[float, At] = field(default_factory=dict)
    writer: ExitStack | None = None

    def commit(self, new: At, keep: int | None) -> None:
        if keep is not None and keep > 1 and self.now is not None and self.now.is_before(new):
            self.kept.setdefault(self.now.time_s, self.now)
        self.now = new
        if keep is not None:
            ours = [one for one in self.kept.values() if one.stream == new.stream]
            past = sorted((one for one in ours if one.is_before(new)), key=lambda one: one.time_s)
            stay = past[max(0, len(past) - keep + 1) :]
            self.kept = {time: one for time, one in self.kept.items() if one not in ours or one in stay}

    @property
    def moments(self) -> list[At]:
        assert self.now is not None
        past = [one for one in self.kept.values() if one.is_before(self.now)]
        return [*sorted(past, key=lambda one: one.time_s), self.now]


class Folder(RuleBasedStateMachine):
    """A folder of states of every form."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.places: dict[str, Place] = {}
        self.untidy: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for place in self.places.values():
                if place.writer is not None:
                    place.writer.close()
            shutil.rmtree(self.folder)

    def place(self, name: str) -> Place:
        return self.places.setdefault(name, Place())

    def plan(self, name: str, stream: str, force: bool, append: bool) -> tuple[str, list[At]]:
        """Return the video to watch and the commits that lead to its end."""
        now = self.place(name).now
        if now is None or force or now.stream != stream:
            first, video = 0, stream[0]
        else:
            goes_on = append and now.state.complete and now.video == stream[0]
            first, video = now.index + 1, stream[1] if goes_on else now.video
            if now.state.complete and not goes_on:
                return video, []
        states = _commits(stream)
        ends = [i for i, state in enumerate(states) if state.complete]
        end = ends[stream.index(video)]
        return video, [At(stream, i) for i in range(first, end + 1)]

    @rule(
        name=paths,
        stream=streams,
        keep=keeps,
        force=st.booleans(),
        append=st.booleans(),
        most=st.sampled_from([1, 2, None]),
    )
    def ingest(self, name: str, stream: str, keep: int | None, force: bool, append: bool, most: int | None) -> None:
        self._watch(name, stream, keep, force, append, most, Fault())

    @precondition(lambda self: faults.LINUX)
    @rule(
        name=paths,
        keep=keeps,
        append=st.booleans(),
        at=st.integers(1, 400) | st.integers(1, 4000),
        error=st.sampled_from([KILL, KILL, errno.EIO, errno.ENOSPC]),
    )
    def cut_off(self, name: str, keep: int | None, append: bool, at: int, error: int) -> None:
        """Kill it or let the disk fail at a system call."""
        now = self.place(name).now
        stream = "AB" if now is None else now.stream
        self._watch(name, stream, keep, False, append, None, Fault(at, error, lasting=error == errno.ENOSPC))

    def _watch(
        self, name: str, stream: str, keep: int | None, force: bool, append: bool, most: int | None, fault: Fault
    ) -> None:
        place, path = self.place(name), self.folder / name
        video, ahead = self.plan(name, stream, force, append)
        appended = place.now is not None and not force and video == stream[1] and place.now.stream == stream
        options = {"keep": keep, "overwrite": force, "append": appended}
        if place.writer is not None:
            with pytest.raises(StateLocked):
                watch(path, video, most, **options)
        elif place.now is not None and place.now.stream != stream and not force:
            with pytest.raises(StateMismatch):
                watch(path, video, most, **options)
        elif not fault.at:
            assert watch(path, video, most, **options) == len(ahead[:most])
            for one in ahead[:most]:
                place.commit(one, keep)
            if ahead:
                self.untidy.discard(name)
        else:
            ended = faults.run(lambda: watch(path, video, most, **options), self.folder, fault)
            assert ended.status in (0, -9)
            assert ended.error is None or ended.error[1], ended.error
            self._find(name, ahead, keep)
            assert ended.value is None or ended.value == len(ahead)

    def _find(self, name: str, ahead: list[At], keep: int | None) -> None:
        """Find which commit a run that was cut off has reached; it must be one of those ahead, or none."""
        place, path = self.places[name], self.folder / name
        self.untidy.add(name)
        try:
            found = load_state(path)
        except StateNotFound:
            found = None
        before, earlier = place.now, dict(place.kept)
        for one in ahead:
            if (before is None and found is None) or (
                before is not None and found is not None and same(found, before.state)
            ):
                break
            earlier = dict(place.kept) | ({place.now.time_s: place.now} if place.now is not None else {})
            place.commit(one, keep)
            before = one
        # At most the commit before and one that is to go are still there.
        there = {header.clock.stream_time_s for _, header in form_of(path).kept()}
        assert place.kept.keys() <= there <= {*place.kept, *earlier, *([place.now.time_s] if place.now else [])}
        known = {**earlier, **place.kept, **({place.now.time_s: place.now} if place.now else {})}
        place.kept = {time: known[time] for time in there} | place.kept

    @rule(source=paths, name=paths, force=st.booleans())
    def convert(self, source: str, name: str, force: bool) -> None:
        if source == name:
            return
        place, now = self.place(name), self.place(source).now
        refusal: type[StateError] | None = None
        if place.writer is not None:
            refusal = StateLocked
        elif now is None:
            refusal = StateNotFound
        elif place.now is not None and not force and (place.now.stream, place.now.video) != (now.stream, now.video):
            refusal = StateMismatch
        if refusal is not None:
            with pytest.raises(refusal):
                convert(self.folder / source, self.folder / name, overwrite=force)
        else:
            assert now is not None
            convert(self.folder / source, self.folder / name, overwrite=force)
            place.commit(now, None)
            self.untidy.discard(name)

    @precondition(lambda self: any(place.now for place in self.places.values()))
    @rule(name=paths, at_s=st.floats(0, 6))
    def query(self, name: str, at_s: float) -> None:
        place, path = self.place(name), self.folder / name
        fit = [one for one in (place.moments if place.now else []) if one.time_s <= at_s + 5e-4]
        if fit:
            assert same(load_state(path, at_s=at_s), fit[-1].state)
            assert load(path, MockBackbone(), at_s=at_s).ask("what is first ?").text == _answer(fit[-1])
        else:
            with pytest.raises(StateNotFound):
                load_state(path, at_s=at_s)

    @rule(name=paths)
    def open_or_close_a_second_writer(self, name: str) -> None:
        place = self.place(name)
        if place.writer is not None:
            place.writer.close()
            place.writer = None
        else:
            place.writer = ExitStack()
            place.writer.enter_context(Writer(self.folder / name))

    @invariant()
    def every_state_is_the_one_of_the_model(self) -> None:
        for name, place in getattr(self, "places", {}).items():
            path = self.folder / name
            if place.now is None:
                with pytest.raises(StateNotFound):
                    load_state(path)
                continue
            assert same(load_state(path), place.now.state)
            assert moments(path) == [one.time_s for one in place.moments]
            for one, header in form_of(path).kept():
                assert same(load_state(one), place.kept[header.clock.stream_time_s].state)

    @invariant()
    def nothing_else_is_in_the_folder(self) -> None:
        for one in self.folder.iterdir() if hasattr(self, "folder") else ():
            name = one.name.split("@")[0]
            if one.name.startswith("."):
                owner = next(name for name in self.places if one.name.startswith(f".{name}."))
                assert owner in self.untidy or (one.suffix == ".lock" and self.places[owner].writer is not None)
            else:
                assert self.places[name].now is not None


def run(examples: int, steps: int) -> None:
    options: dict[str, Any] = {"max_examples": examples, "stateful_step_count": steps, "deadline": None}
    run_state_machine_as_test(Folder, settings=settings(**options, suppress_health_check=list(HealthCheck)))


def test_states_in_a_folder_behave_as_the_model_says() -> None:
    run(5, 12)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_states_in_a_folder_behave_as_the_model_says_for_long() -> None:
    run(EXAMPLES, 30)
