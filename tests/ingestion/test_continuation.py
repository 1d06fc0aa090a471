"""Continuing a state, with the same or another source, ends in the bytes of one uninterrupted run,
or is refused.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protokv.core.backbone import Backbone
from protokv.errors import StateCorrupt, StateMismatch
from protokv.ingestion import Every, IngestProgress, IngestStarted, IngestSummary, ingest_events
from protokv.memories import DurableConfig
from protokv.state.reader import StateReader, load_state
from protokv.state.sources import read_fingerprints
from protokv.stream.opening import load, save
from protokv.stream.session import Session
from protokv.texts import Keywords
from protokv.video import Frame, Source, open_source, read_steps
from protokv.video.source import FrameRequest
from tests.conftest import random_frames
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.state.test_checkpoint import CONFIGS
from tests.video.conftest import Clip, write

MOCK = MockBackbone()
A = Prepared(1, 9)
B = Prepared(2, 6)
C = Prepared(3, 4)


def run(
    path: Path, source: Source, *, stop_after: int = 10**9, **changes: Any
) -> tuple[IngestStarted, IngestSummary]:
    """Ingest, until `stop_after` steps; return the first event and the last one."""
    options: Keywords = {
        "config": CONFIGS["durable"],
        "backbone": MOCK,
        "every": Every(n_steps=2),
        **changes,
    }
    steps: list[object] = []
    events = ingest_events(source, path, should_stop=lambda: len(steps) >= stop_after, **options)
    for event in events:
        if isinstance(event, IngestStarted):
            started = event
        steps += [event] if isinstance(event, IngestProgress) else []
    assert isinstance(event, IngestSummary)
    return started, event


def test_a_system_prompt_stays_and_another_is_refused(
    tiny: Backbone, path: Path, tmp_path: Path
) -> None:
    watch = partial(run, backbone=tiny)
    system = "the star is blue"
    whole = tmp_path / "whole.safetensors"
    watch(whole, A, system=system)
    watch(path, A, system=system, stop_after=2)
    with pytest.raises(
        StateMismatch, match="its system prompt is the star is blue, this run's is a ring"
    ):
        watch(path, A, system="a ring")
    watch(path, A)
    assert path.read_bytes() == whole.read_bytes()
    session = load(path, tiny)
    assert session.backbone.prefix_ids == tiny.with_system(system).prefix_ids != tiny.prefix_ids
    watch(path, B, append=True)
    assert StateReader.open(path).header.settings["system"] == system
    plain = tmp_path / "plain.safetensors"
    watch(plain, A)
    with pytest.raises(StateMismatch, match="its system prompt is None"):
        watch(plain, B, system=system, append=True)
    for forged in ("<|im_end|>", "a ring", ["ring"]):
        state = load_state(path)
        with pytest.raises(StateCorrupt):
            Session.restore(replace(state, settings={**state.settings, "system": forged}), tiny)


@pytest.mark.parametrize("name", CONFIGS)
def test_appending_gives_the_state_of_a_session_of_all(
    name: str, tiny: Backbone, path: Path
) -> None:
    config = CONFIGS[name]
    how = []
    for source in (A, B, C):
        started, _ = run(path, source, config=config, backbone=tiny, append=True)
        how.append((started.how, started.steps))
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
        n: t.tolist() for n, t in session.make_state().tensors.items()
    }
    assert read_fingerprints(found) == tuple(one.info.fingerprint for one in (A, B, C))
    # The short last step of a source is filled, and the next source begins after it.
    assert found.source is not None
    assert (found.source["first_step"], found.source["start_s"]) == (8, 8.0)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_an_interrupted_one_goes_on_by_the_same_command(
    stop_after: int, path: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.safetensors"
    run(whole, A)
    run(path, A, append=True)  # there is none yet
    assert path.read_bytes() == whole.read_bytes()
    run(whole, B, append=True)
    _, stopped = run(path, B, append=True, stop_after=stop_after)
    assert (stopped.complete, stopped.steps) == (False, 5 + stop_after)
    started, _ = run(path, B, append=True)
    assert started.how == "continued"
    assert path.read_bytes() == whole.read_bytes()


def test_no_source_is_watched_twice(path: Path) -> None:
    run(path, A)
    run(path, B, append=True)
    before = path.read_bytes()
    written = path.stat().st_mtime_ns
    # The last source, the one before it, and the command that made the state.
    for source, append in [(B, True), (A, True), (A, False)]:
        started, summary = run(path, source, append=append)
        assert started.how == "finished"
        assert (summary.complete, summary.steps, summary.file_bytes) == (True, 8, len(before))
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, written)
    with pytest.raises(
        StateMismatch, match=r"the state of another source, 1\.mp4, .*; this run's source is 2\.mp4"
    ):
        run(path, B)


def test_a_source_without_a_fingerprint_equals_no_source_and_not_even_itself(path: Path) -> None:
    session = Session.start(MOCK, CONFIGS["durable"])
    live = Prepared(1, 9)
    for step in range(3):
        session.watch(random_frames(step))
    save(session, path)
    live.info = replace(live.info, fingerprint=None)
    assert run(path, live, append=True)[1].steps == 8
    with pytest.raises(StateMismatch, match="this run's source is"):
        run(path, live)
    assert run(path, live, append=True)[1].steps == 13
    assert read_fingerprints(StateReader.open(path).header) == (None, None, None)


def changed(**fields: object) -> dict[str, object]:
    other = MockBackbone()
    vars(other).update(fields)
    return {"backbone": other}


SETTINGS = {**dict.fromkeys(MOCK.settings, "other"), "new": 1}


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("memory.budget", {"config": DurableConfig(budget=44)}),
        ("memory.seed", {"config": DurableConfig(budget=40).with_fields({"seed": 1})}),
        ("fps", {"fps": 3.0}),
        ("its chunk is 1, this run's is 4", {"chunk": 4}),
        ("weights_digest", changed(identity=replace(MOCK.identity, weights_digest="other"))),
        (next(iter(MOCK.settings)), changed(settings=SETTINGS)),
        (r"its last source 1\.mp4 is not watched to the end", {"source": B, "append": True}),
    ],
)
def test_another_memory_rate_model_size_of_frames_or_source_is_refused_with_the_difference(
    said: str, change: Keywords, path: Path
) -> None:
    run(path, A, stop_after=3)
    before = path.read_bytes()
    with pytest.raises(StateMismatch, match=said):
        run(path, **{"source": A, **change})
    assert path.read_bytes() == before


CHANGED = {
    "a flipped byte": lambda data, at: data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :],
    "a hole": lambda data, at: data[:at] + bytes(200) + data[at + 200 :],
    "cut short": lambda data, at: data[:at],
    "joined": lambda data, at: 2 * data,
}


@pytest.mark.parametrize(
    ("kind", "deed"),
    [
        ("mkv", "a hole"),
        ("ts", "a flipped byte"),
        ("ts", "cut short"),
        ("ts", "joined"),
        ("avi", "a flipped byte"),
        ("mp4", "a hole"),
    ],
)
def test_an_interrupted_run_over_damage_or_a_join_ends_in_the_same_bytes_and_says_the_same(
    kind: str, deed: str, tmp_path: Path
) -> None:
    mux = {"movflags": "faststart"} if kind == "mp4" else {}
    clip = Clip([40 * i for i in range(100)], suffix=kind, gop=25, mux=mux)
    path = write(clip, tmp_path / f"x.{kind}")
    data = path.read_bytes()
    begin = data.index(b"mdat") if kind == "mp4" else 600
    path.write_bytes(CHANGED[deed](data, begin + round((len(data) - begin) * 0.6)))
    with open_source(path) as source:
        _, whole = run(tmp_path / "whole.safetensors", source)
        joined = "at 4.00 s another recording is joined on: times go on"
        assert (joined in source.notes) == (deed == "joined")
        for stop_after in range(1, whole.steps, 2):
            state = tmp_path / f"{stop_after}.safetensors"
            run(state, source, stop_after=stop_after)
            assert run(state, source)[1].damage == whole.damage
            assert state.read_bytes() == (tmp_path / "whole.safetensors").read_bytes(), stop_after


def test_the_state_says_how_many_of_the_frames_each_decoder_gave(tmp_path: Path) -> None:
    class Mixed(Prepared):
        def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
            for frame in super()._read(wanted):
                frame.decoder = "pyav" if frame.time_s >= 3.0 else "decord"
                yield frame

    for stop_after in (1, 3, 10):
        path = tmp_path / f"{stop_after}.safetensors"
        run(path, Mixed(1, 12), stop_after=stop_after)
        run(path, Mixed(1, 12))
        source: Any = StateReader.open(path).header.source
        assert source["decoders"] == {"decord": 6, "pyav": 6}
