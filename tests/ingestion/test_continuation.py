"""Continuing a state, with the same or another source, ends in the bytes of one uninterrupted run, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest

from protokv.core.backbone import Backbone
from protokv.core.session import Session
from protokv.errors import StateCorrupt, StateMismatch
from protokv.ingestion import Every, Progress, Started, Summary, ingest
from protokv.memories import DurableConfig
from protokv.state.checkpoint import from_state, to_state
from protokv.state.reader import Reader, load, load_state
from protokv.state.sources import list_fingerprints
from protokv.state.writer import save
from protokv.video import Frame, Source, open_source, read_steps
from tests.conftest import random_frames
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.state.test_checkpoint import CONFIGS
from tests.video.conftest import Clip, write

FRONT = {"movflags": "faststart"}
A, B, C = Prepared(1, 9), Prepared(2, 6), Prepared(3, 4)


class Run:
    """Ingests a prepared source; `started` is the first event of the last call."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def __call__(self, path: Path | str, source: Source, **options: object) -> Summary:
        stop_after = options.pop("stop_after", 10**9)
        options = {"config": CONFIGS["durable"], "backbone": self.backbone, "every": Every(n_steps=2), **options}
        events: list[object] = []

        def enough() -> bool:
            return sum(isinstance(event, Progress) for event in events) >= stop_after  # type: ignore[operator]

        for event in ingest(source, path, should_stop=enough, **options):  # type: ignore[arg-type]
            events.append(event)
        self.started, *_, summary = events
        assert isinstance(self.started, Started)
        assert isinstance(summary, Summary)
        return summary


@pytest.fixture
def mock() -> MockBackbone:
    return MockBackbone()


@pytest.fixture
def run(mock: MockBackbone) -> Run:
    return Run(mock)


def test_a_system_prompt_stays_with_its_state_and_another_is_refused(run: Run, tiny: Backbone, tmp_path: Path) -> None:
    system, whole, path = "the star is blue", tmp_path / "whole.safetensors", tmp_path / "s.safetensors"
    prompted = tiny.with_system(system)
    run(whole, A, backbone=tiny, system=system)
    run(path, A, backbone=tiny, system=system, stop_after=2)
    with pytest.raises(StateMismatch, match="its system prompt is the star is blue, this run's is a ring"):
        run(path, A, backbone=tiny, system="a ring")
    run(path, A, backbone=tiny, stop_after=1)
    run(path, A, backbone=tiny, system=system)
    assert path.read_bytes() == whole.read_bytes()
    session = load(path, tiny)
    assert session.backbone.prefix_ids == prompted.prefix_ids != tiny.prefix_ids
    assert session.memory.tensors()["sink.keys"].shape[2] == len(prompted.prefix_ids)
    run(path, B, backbone=tiny, append=True)
    assert Reader.open(path).header.settings["system"] == system
    plain = tmp_path / "plain.safetensors"
    run(plain, A, backbone=tiny)
    with pytest.raises(StateMismatch, match="its system prompt is None"):
        run(plain, B, backbone=tiny, system=system, append=True)
    assert "system" not in Reader.open(plain).header.settings
    assert load(plain, prompted).backbone.prefix_ids == tiny.prefix_ids
    for told in ("<|im_end|>", "a ring", ["ring"]):
        state = load_state(path)
        forged = replace(state, settings={**state.settings, "system": told})
        with pytest.raises(StateCorrupt):
            from_state(forged, tiny)


@pytest.mark.parametrize("name", CONFIGS)
def test_appending_gives_the_state_of_one_session_that_watched_both_one_behind_the_other(
    name: str, run: Run, tiny: Backbone, tmp_path: Path
) -> None:
    path, config = tmp_path / "s.safetensors", CONFIGS[name]
    how = []
    for source in (A, B, C):
        run(path, source, config=config, backbone=tiny, append=True)
        how.append((run.started.how, run.started.steps))
    assert how == [("started", 0), ("appended", 5), ("appended", 8)]
    session = Session.start(tiny, config)
    for source in (A, B, C):
        begins_s = session.clock.stream_time_s
        for step in read_steps(source, session.clock.fps, tiny.frames_per_step):
            session.watch(step.images, begins_s + step.time_s)
    found = load_state(path)
    assert found.clock == session.clock
    assert found.complete
    assert {n: t.tolist() for n, t in found.tensors.items() if not n.startswith("thumbnails.")} == {
        n: t.tolist() for n, t in to_state(session).tensors.items()
    }
    assert list_fingerprints(found) == tuple(one.info.fingerprint for one in (A, B, C))
    # The short last step of a source is filled, and the next source begins after it.
    assert found.source is not None
    assert (found.source["first_step"], found.source["start_s"]) == (8, 8.0)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_an_interrupted_one_continues_with_the_same_command(stop_after: int, run: Run, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.safetensors", tmp_path / "s.safetensors"
    for target in (whole, path):
        run(target, A)
    run(whole, B, append=True)
    stopped = run(path, B, append=True, stop_after=stop_after)
    assert not stopped.complete
    assert stopped.steps == 5 + stop_after
    run(path, B, append=True)
    assert run.started.how == "continued"
    assert path.read_bytes() == whole.read_bytes()


def test_the_interval_of_commits_changes_nothing_of_the_state(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(4)]
    intervals = (Every(n_steps=1), Every(seconds=2.0), Every(wall_s=1e-9), Every())
    for path, every in zip(paths, intervals, strict=True):
        run(path, A, every=every)
    assert len({path.read_bytes() for path in paths}) == 1


def test_no_source_is_watched_twice(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    run(path, A)
    run(path, B, append=True)
    before, written = path.read_bytes(), path.stat().st_mtime_ns
    # The last source, the one before it, and the command that made the state.
    for source, append in [(B, True), (A, True), (A, False)]:
        summary = run(path, source, append=append)
        assert run.started.how == "finished"
        assert summary.complete
        assert summary.steps == 8
        assert summary.file_bytes == len(before)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, written)


def test_a_state_that_began_with_another_source_is_refused_without_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    run(path, A)
    run(path, B, append=True)
    with pytest.raises(StateMismatch, match=r"the state of another video, 1\.mp4; this run's source is 2\.mp4"):
        run(path, B)


def test_appending_waits_for_the_end_of_the_source_before(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    run(path, A, stop_after=3)
    with pytest.raises(StateMismatch, match=r"its last source 1\.mp4 is not watched to the end") as caught:
        run(path, B, append=True)
    assert "1.mp4 again" in caught.value.hint


def test_a_state_of_a_program_can_be_continued(run: Run, mock: MockBackbone, tmp_path: Path) -> None:
    path, session = tmp_path / "s.safetensors", Session.start(mock, CONFIGS["durable"])
    for step in range(3):
        session.watch(random_frames(step))
    save(session, path)
    assert run(path, B, append=True).steps == 6
    assert list_fingerprints(Reader.open(path).header) == (None, "2/6")


def changed(mock: MockBackbone, **fields: object) -> dict[str, object]:
    other = copy(mock)
    vars(other).update(fields)
    return {"backbone": other}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("memory.budget", lambda mock: {"config": DurableConfig(budget=44)}),
        ("memory.seed", lambda mock: {"config": DurableConfig(budget=40).with_fields({"seed": 1})}),
        ("fps", lambda mock: {"fps": 3.0}),
        ("weights_digest", lambda mock: changed(mock, identity=replace(mock.identity, weights_digest="other"))),
        (
            next(iter(MockBackbone().settings)),
            lambda mock: changed(mock, settings={**dict.fromkeys(mock.settings, "other"), "new": 1}),
        ),
    ],
)
def test_another_memory_rate_model_or_size_of_frames_is_refused_with_the_difference(
    field: str, change: Callable[[MockBackbone], dict[str, object]], run: Run, mock: MockBackbone, tmp_path: Path
) -> None:
    path = tmp_path / "s.safetensors"
    run(path, A, stop_after=3)
    before = path.read_bytes()
    with pytest.raises(StateMismatch, match=field):
        run(path, A, **change(mock))
    assert path.read_bytes() == before


def test_a_missing_state_is_started(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "s.safetensors", A, append=True)
    run(tmp_path / "t.safetensors", A)
    assert (tmp_path / "s.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()


def test_a_source_without_a_fingerprint_equals_no_source_and_not_even_itself(run: Run, tmp_path: Path) -> None:
    path, live = tmp_path / "s.safetensors", Prepared(1, 9)
    live.info = replace(live.info, fingerprint=None)
    run(path, live)
    with pytest.raises(StateMismatch, match="this run's source is"):
        run(path, live)
    assert run(path, live, append=True).steps == 10


DAMAGED = {
    "a flipped byte": lambda data, at: data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :],
    "a hole": lambda data, at: data[:at] + bytes(200) + data[at + 200 :],
    "cut short": lambda data, at: data[:at],
}


@pytest.mark.parametrize(
    ("kind", "deed"),
    [("mkv", "a hole"), ("ts", "a flipped byte"), ("ts", "cut short"), ("avi", "a flipped byte"), ("mp4", "a hole")],
)
def test_an_interrupted_run_over_a_damaged_file_ends_in_the_bytes_of_one_run(
    kind: str, deed: str, run: Run, tmp_path: Path
) -> None:
    clip = Clip([40 * i for i in range(100)], suffix=kind, gop=25, mux=FRONT if kind == "mp4" else {})
    path = write(clip, tmp_path / f"x.{kind}")
    data = path.read_bytes()
    begin = data.index(b"mdat") if kind == "mp4" else 600
    path.write_bytes(DAMAGED[deed](data, begin + round((len(data) - begin) * 0.6)))
    with open_source(path) as source:
        whole = run(tmp_path / "whole.safetensors", source)
        for stop_after in range(1, whole.steps, 2):
            state = tmp_path / f"{stop_after}.safetensors"
            run(state, source, stop_after=stop_after)
            assert run(state, source).damage == whole.damage
            assert state.read_bytes() == (tmp_path / "whole.safetensors").read_bytes(), stop_after


def test_the_state_says_how_many_of_the_frames_each_decoder_gave(run: Run, tmp_path: Path) -> None:
    class Mixed(Prepared):
        def frames(self, start_s: float = 0.0, **options: object) -> Iterator[Frame]:
            for frame in super().frames(start_s, **options):
                frame.decoder = "pyav" if frame.time_s >= 3.0 else "decord"
                yield frame

    path = tmp_path / "s.safetensors"
    run(path, Mixed(1, 12))
    whole = Reader.open(path).header.source
    assert whole is not None
    assert whole["decoders"] == {"decord": 6, "pyav": 6}
    for stop_after in (1, 3, 5):
        path = tmp_path / f"{stop_after}.safetensors"
        run(path, Mixed(1, 12), stop_after=stop_after)
        run(path, Mixed(1, 12))
        assert Reader.open(path).header.source == whole
