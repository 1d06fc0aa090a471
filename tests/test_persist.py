"""Sessions on disk: continuing one, with the same or another video, gives the bytes of one uninterrupted run."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import protokv
from protokv import snapshot
from protokv.backbones.base import Backbone
from protokv.config import DurableConfig, MemoryConfig, PaperConfig
from protokv.errors import ConfigError, StateCorrupt, StateError, StateLocked, StateMismatch, StateNotFound
from protokv.ingest import Commit, Every, Summary, ingest
from protokv.persist import from_state, load, save, to_state
from protokv.resume import open_session
from protokv.session import Session
from protokv.snapshot.sources import fingerprints
from protokv.snapshot.writer import Writer
from protokv.video import read_steps
from tests.conftest import random_frames
from tests.snapshot.nursery import Prepared

CONFIGS = {
    "paper": PaperConfig(budget=40),
    "durable": DurableConfig(budget=40),
    "sliding-window": MemoryConfig.of("sliding-window", budget=40),
    "full": MemoryConfig.of("full", budget=40),
}


def watched(backbone: Backbone, config: MemoryConfig, first: int, last: int, session: Session | None = None) -> Session:
    session = session or Session(backbone, config)
    for step in range(first, last):
        session.watch(random_frames(step))
    return session


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stop", [1, 7, 19])
def test_saving_and_loading_on_the_way_gives_the_same_bytes(
    tiny: Backbone, tmp_path: Path, name: str, stop: int
) -> None:
    whole, half, joined = (tmp_path / f"{part}.safetensors" for part in ("whole", "half", "joined"))
    save(watched(tiny, CONFIGS[name], 0, 24), whole)
    save(watched(tiny, CONFIGS[name], 0, stop), half)
    save(watched(tiny, CONFIGS[name], stop, 24, load(half, tiny)), joined)
    assert joined.read_bytes() == whole.read_bytes()


def test_a_loaded_session_answers_as_the_saved_one(tiny: Backbone, tmp_path: Path) -> None:
    session = watched(tiny, CONFIGS["durable"], 0, 20)
    save(session, tmp_path / "s.safetensors")
    later = load(tmp_path / "s.safetensors", tiny)
    assert torch.equal(later.prefill("what is first ?"), session.prefill("what is first ?"))
    assert later.clock == session.clock
    assert later.config == session.config


def test_a_state_loads_its_own_model_by_name(tiny: Backbone, tmp_path: Path) -> None:
    save(watched(tiny, CONFIGS["durable"], 0, 3), tmp_path / "s.safetensors")
    assert protokv.load(tmp_path / "s.safetensors", device="cpu").backbone.identity == tiny.identity


@pytest.mark.parametrize("field", ["family", "config_hash", "weights_digest", "dtype"])
def test_a_state_of_another_model_is_refused_by_field(tiny: Backbone, field: str) -> None:
    state = to_state(watched(tiny, CONFIGS["durable"], 0, 3))
    other = replace(state, backbone=replace(state.backbone, **{field: "another"}))
    with pytest.raises(StateMismatch, match=field):
        from_state(other, tiny)


def test_memory_settings_that_make_no_sense_are_corrupt_not_a_crash(tiny: Backbone) -> None:
    state = to_state(watched(tiny, CONFIGS["durable"], 0, 3))
    with pytest.raises(StateCorrupt, match="budget"):
        from_state(replace(state, memory={**state.memory, "budget": -1}), tiny)


def test_a_state_whose_tensors_do_not_fit_its_settings_is_refused(tiny: Backbone) -> None:
    state = to_state(watched(tiny, CONFIGS["durable"], 0, 3))
    with pytest.raises(StateCorrupt, match=r"near\.keys"):
        from_state(replace(state, memory={**state.memory, "budget": 44}), tiny)


def test_a_clock_that_contradicts_the_model_is_refused(tiny: Backbone) -> None:
    state = to_state(watched(tiny, CONFIGS["durable"], 0, 3))
    with pytest.raises(StateCorrupt, match="clock"):
        from_state(replace(state, clock=replace(state.clock, next_position=0)), tiny)


def test_the_file_is_as_large_after_a_long_stream_as_after_a_short_one(tiny: Backbone, tmp_path: Path) -> None:
    config = DurableConfig(budget=40).with_fields({"residual": False})
    session = watched(tiny, config, 0, 9)
    save(session, tmp_path / "short.safetensors")
    save(watched(tiny, config, 9, 90, session), tmp_path / "long.safetensors")
    short, long = (snapshot.load(tmp_path / f"{name}.safetensors") for name in ("short", "long"))
    assert {n: (t.shape, t.dtype) for n, t in short.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in long.tensors.items()
    }


def test_saving_while_another_writes_is_refused(tiny: Backbone, tmp_path: Path) -> None:
    session = watched(tiny, CONFIGS["durable"], 0, 3)
    with Writer(tmp_path / "s.safetensors"), pytest.raises(StateLocked):
        save(session, tmp_path / "s.safetensors")
    save(session, tmp_path / "s.safetensors")


def test_an_unverified_load_lets_a_changed_byte_pass_and_nothing_else(tiny: Backbone, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save(watched(tiny, CONFIGS["durable"], 0, 20), path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateCorrupt):
        load(path, tiny)
    assert load(path, tiny, verify=False).clock.steps == 20
    path.write_bytes(data[:-1])
    with pytest.raises(StateCorrupt):
        load(path, tiny, verify=False)


@pytest.fixture
def loaded(tiny: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are not loaded anew for every run."""
    monkeypatch.setattr("protokv.resume.load_backbone", lambda *_, **__: tiny)


A, B, C = Prepared(1, 9), Prepared(2, 6), Prepared(3, 4)


def run(path: Path | str, source: Prepared, config: MemoryConfig = CONFIGS["durable"], **options: object) -> Summary:
    stop_after = options.pop("stop_after", None)
    with Writer(path) as writer:
        session, segment = open_session(source, path, config, **options)  # type: ignore[arg-type]
        stops = iter(range(stop_after or 10**9))
        events = list(
            ingest(
                session,
                source,
                writer,
                every=Every(n_steps=2),
                should_stop=lambda: next(stops, None) is None,
                segment=segment,
            )
        )
    assert isinstance(events[-1], Summary)
    return events[-1]


@pytest.mark.usefixtures("loaded")
class TestAppending:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_it_gives_the_state_of_one_session_that_watched_both_one_behind_the_other(
        self, name: str, tiny: Backbone, tmp_path: Path
    ) -> None:
        path, config = tmp_path / "s.safetensors", CONFIGS[name]
        for source in (A, B, C):
            run(path, source, config, append=True)
        session = Session(tiny, config)
        for source in (A, B, C):
            begins_s = session.clock.stream_time_s
            for step in read_steps(source, session.clock.fps, tiny.frames_per_step):
                session.watch(step.images, begins_s + step.time_s)
        found = snapshot.load(path)
        assert found.clock == session.clock
        assert found.complete
        assert {n: t.tolist() for n, t in found.tensors.items()} == {
            n: t.tolist() for n, t in session.tensors().items()
        }
        assert fingerprints(found) == tuple(one.info.fingerprint for one in (A, B, C))
        # A short last step is filled, and the next source begins behind it.
        assert found.source is not None
        assert (found.source["first_step"], found.source["start_s"]) == (8, 8.0)

    @pytest.mark.parametrize("stop_after", [1, 2, 3])
    def test_an_interrupted_one_continues_with_the_same_command(self, stop_after: int, tmp_path: Path) -> None:
        whole, path = tmp_path / "whole.safetensors", tmp_path / "s.safetensors"
        for target in (whole, path):
            run(target, A)
        run(whole, B, append=True)
        stopped = run(path, B, append=True, stop_after=stop_after)
        assert not stopped.complete
        assert stopped.steps == 5 + stop_after
        run(path, B, append=True)
        assert path.read_bytes() == whole.read_bytes()

    def test_no_source_is_watched_twice(self, tmp_path: Path) -> None:
        path = tmp_path / "s.safetensors"
        run(path, A)
        run(path, B, append=True)
        before, written = path.read_bytes(), path.stat().st_mtime_ns
        # The last one, one before it, and the command that made the state in the first place.
        for source, append in [(B, True), (A, True), (A, False)]:
            summary = run(path, source, append=append)
            assert summary.complete
            assert summary.steps == 8
            assert summary.file_bytes == len(before)
        assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, written)

    def test_a_state_that_began_with_another_source_is_refused_without_it(self, tmp_path: Path) -> None:
        path = tmp_path / "s.safetensors"
        run(path, A)
        run(path, B, append=True)
        with pytest.raises(StateMismatch, match="its source is 1/9, this run's is 2/6"):
            run(path, B)

    def test_it_waits_for_the_end_of_the_source_before(self, tmp_path: Path) -> None:
        path = tmp_path / "s.safetensors"
        run(path, A, stop_after=3)
        with pytest.raises(StateMismatch, match=r"its last source 1\.mp4 is not watched to the end") as caught:
            run(path, B, append=True)
        assert "1.mp4 again" in caught.value.hint

    def test_a_state_of_a_program_can_be_continued(self, tiny: Backbone, tmp_path: Path) -> None:
        path = tmp_path / "s.safetensors"
        save(watched(tiny, CONFIGS["durable"], 0, 3), path)
        assert run(path, B, append=True).steps == 6
        assert fingerprints(snapshot.read_header(path)) == (None, "2/6")

    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("memory.budget", {"config": DurableConfig(budget=44)}),
            ("memory.seed", {"config": DurableConfig(budget=40).with_fields({"seed": 1})}),
            ("fps", {"fps": 3.0}),
        ],
    )
    def test_another_memory_or_rate_is_refused_with_the_difference(
        self, field: str, change: dict[str, object], tmp_path: Path
    ) -> None:
        path = tmp_path / "s.safetensors"
        run(path, A)
        before = path.read_bytes()
        with pytest.raises(StateMismatch, match=f"its {field} is"):
            run(path, B, append=True, **change)  # type: ignore[arg-type]
        assert path.read_bytes() == before

    def test_another_model_is_refused(self, tiny: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "s.safetensors"
        run(path, A)
        other = copy(tiny)
        other.identity = replace(tiny.identity, weights_digest="other")
        monkeypatch.setattr("protokv.resume.load_backbone", lambda *_, **__: other)
        with pytest.raises(StateMismatch, match="weights_digest"):
            run(path, B, append=True)

    def test_other_frames_for_the_model_are_refused(
        self, tiny: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "s.safetensors"
        run(path, A, stop_after=3)
        other = copy(tiny)
        name = next(iter(tiny.settings))
        other.settings = {**tiny.settings, name: "other", "new setting": 1}
        monkeypatch.setattr("protokv.resume.load_backbone", lambda *_, **__: other)
        with pytest.raises(StateMismatch, match=f"its {name} is"):
            run(path, A)

    def test_it_and_starting_over_contradict(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="start it over"):
            run(tmp_path / "s.safetensors", A, append=True, start_over=True)

    def test_where_there_is_no_state_it_starts_one_unless_there_must_be_one(self, tmp_path: Path) -> None:
        with pytest.raises(StateNotFound):
            run(tmp_path / "s.safetensors", A, append=True, must_exist=True)
        run(tmp_path / "s.safetensors", A, append=True)
        run(tmp_path / "t.safetensors", A)
        assert (tmp_path / "s.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("background", [False, True])
def test_commits_on_the_way_are_told_in_order_when_they_are_on_disk(background: bool, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with Writer(path, background=background) as writer:
        session, _ = open_session(A, path, CONFIGS["durable"])
        commits = []
        for event in ingest(session, A, writer, every=Every(n_steps=1)):
            if isinstance(event, Commit):
                commits.append(event.steps)
                assert snapshot.read_header(path).clock.steps >= event.steps
                assert event.file_bytes > 0
    assert commits == [1, 2, 3, 4, 5, 5]


@pytest.mark.usefixtures("loaded")
def test_a_commit_that_fails_behind_the_stream_ends_the_ingest_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StateError("the disk is gone")

    path, long = tmp_path / "s.safetensors", Prepared(4, 200)
    with Writer(path, background=True) as writer:
        session, _ = open_session(long, path, CONFIGS["durable"])
        monkeypatch.setattr("protokv.snapshot.history.commit", refuse)
        with pytest.raises(StateError, match="the disk is gone"):
            list(ingest(session, long, writer, every=Every(n_steps=3)))
    # Not at the end, and at the latest where the next commit is due.
    assert 3 <= session.clock.steps <= 6
