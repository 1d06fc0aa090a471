"""`ingest` as a program calls it: its events, one model for many sources, and a state whatever ends it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from protokv.errors import ConfigError, SourceUnreadable, StateCorrupt, StateError
from protokv.ingestion import (
    NEVER,
    Commit,
    Every,
    IngestOptions,
    LiveOptions,
    Progress,
    SourceNoted,
    Started,
    Summary,
    ingest,
)
from protokv.state.describe import describe
from protokv.state.reader import Reader, load_state
from protokv.state.store import Store
from protokv.video import Damage, Frame
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.state.test_checkpoint import CONFIGS
from tests.video.conftest import Clip, write

A, B = Prepared(1, 9), Prepared(2, 6)
CONFIG = CONFIGS["durable"]


@pytest.fixture
def mock() -> MockBackbone:
    return MockBackbone()


class Breaking(Prepared):
    """A source that fails after some frames."""

    def __init__(self, seed: int, n_frames: int, after: int, error: BaseException) -> None:
        super().__init__(seed, n_frames)
        self._after, self._error = after, error

    def frames(self, start_s: float = 0.0, **options: object) -> Iterator[Frame]:
        for i, frame in enumerate(super().frames(start_s, **options)):
            if i == self._after:
                raise self._error
            yield frame


def test_start_steps_commits_and_end_are_events_and_the_state_has_the_name_of_the_source(
    mock: MockBackbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    events = list(ingest(A, config=CONFIG, backbone=mock, every=Every(n_steps=2)))
    kinds = [Started, Progress, Progress, Commit, Progress, Progress, Commit, Progress, Commit, Summary]
    assert [type(event) for event in events] == kinds
    assert [event.steps for event in events] == [0, 1, 2, 2, 3, 4, 4, 5, 5, 5]
    assert events[-1].state == "1.safetensors"
    assert load_state("1.safetensors").complete


def test_joined_recordings_are_watched_whole_noted_once_and_resumed_to_equal_bytes(
    mock: MockBackbone, tmp_path: Path
) -> None:
    part = write(Clip([40 * i for i in range(100)], suffix="ts"), tmp_path / "a.ts")
    (tmp_path / "b.ts").write_bytes(2 * part.read_bytes())
    events = list(ingest(tmp_path / "b.ts", tmp_path / "whole.safetensors", CONFIG, backbone=mock))
    assert [one.note for one in events if isinstance(one, SourceNoted)] == [
        "at 4.00 s another recording is joined on: times go on"
    ]
    assert isinstance(end := events[-1], Summary)
    assert (end.stream_time_s, end.complete, end.damaged) == (8.0, True, False)
    for steps in (3, 6):
        path, asked = tmp_path / f"{steps}.safetensors", count()
        list(ingest(tmp_path / "b.ts", path, CONFIG, backbone=mock, should_stop=lambda a=asked, n=steps: next(a) >= n))
        assert load_state(path).clock.steps < 8
        list(ingest(tmp_path / "b.ts", path, CONFIG, backbone=mock))
        assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_settings_by_name_replace_those_of_a_record_of_options(mock: MockBackbone, tmp_path: Path) -> None:
    path, options = tmp_path / "s.safetensors", IngestOptions(config=CONFIG, backbone=mock, keep=9, every=NEVER)
    list(ingest(A, path, options=options, every=Every(n_steps=1), keep=2))
    assert Reader.open(path).commits_s == [4.0, 5.0]
    with pytest.raises(TypeError, match="evry"):
        ingest(A, path, options=options, evry=NEVER)


def test_commits_on_the_way_are_events_in_order_once_they_are_on_disk(mock: MockBackbone, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    commits = []
    for event in ingest(A, path, CONFIG, backbone=mock, every=Every(n_steps=1)):
        if isinstance(event, Commit):
            commits.append(event.steps)
            assert Reader.open(path).header.clock.steps >= event.steps
            assert event.file_bytes > 0
    assert commits == [1, 2, 3, 4, 5, 5]


def test_a_commit_that_fails_ends_the_ingest_at_once(
    mock: MockBackbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StateError("the disk is gone")

    monkeypatch.setattr(Store, "commit", refuse)
    path, seen = tmp_path / "s.safetensors", []
    run = ingest(Prepared(4, 200), path, CONFIG, backbone=mock, every=Every(n_steps=3))
    with pytest.raises(StateError, match="the disk is gone"):
        seen.extend(event.steps for event in run)
    assert max(seen) == 3


def test_a_minute_of_the_clock_commits_by_default(
    mock: MockBackbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, commits, calls = 0.0, [], count()
    monkeypatch.setattr("protokv.ingestion.watching.time.perf_counter", lambda: now_s + 1e-6 * next(calls))
    for event in ingest(Prepared(5, 20), tmp_path / "s.safetensors", CONFIG, backbone=mock):
        if isinstance(event, Progress):
            # A step takes 22 s, so the third is the first after a minute.
            now_s += 22.0
        if isinstance(event, Commit):
            commits.append(event.steps)
    assert commits == [3, 6, 9, 10]
    assert not NEVER.is_due(10**9, 1e9, 1e9)


@pytest.mark.parametrize("error", [RuntimeError("a cable"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_watched_steps_are_saved_whatever_error_ends_the_run(
    error: BaseException, mock: MockBackbone, tmp_path: Path
) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(type(error)):
        list(ingest(Breaking(1, 9, 7, error), path, CONFIG, backbone=mock))
    found = load_state(path)
    assert (found.clock.steps, found.complete) == (3, False)
    list(ingest(A, path, CONFIG, backbone=mock))
    list(ingest(A, tmp_path / "whole.safetensors", CONFIG, backbone=mock))
    assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_watched_steps_are_saved_when_the_caller_closes_the_run(mock: MockBackbone, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    run = ingest(A, path, CONFIG, backbone=mock)
    while not (isinstance(event := next(run), Progress) and event.steps == 2):
        pass
    run.close()  # type: ignore[attr-defined]
    assert load_state(path).clock.steps == 2


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("protokv.core.session.StepKV", RuntimeError("half a step")),
        ("protokv.ingestion.watching.to_state", StateCorrupt("a number is not finite")),
    ],
    ids=["an error within a step", "a state that cannot be loaded"],
)
def test_what_is_no_sound_state_does_not_replace_the_last_commit(
    broken: str, error: Exception, mock: MockBackbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    path = tmp_path / "s.safetensors"
    run = ingest(A, path, CONFIG, backbone=mock, every=Every(n_steps=2))
    while next(run).steps != 3:
        pass
    monkeypatch.setattr(broken, refuse)
    with pytest.raises(type(error), match=str(error)):
        list(run)
    assert load_state(path).clock.steps == 2


def test_a_source_that_ends_early_is_a_state_and_damage(mock: MockBackbone, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    *_, summary = ingest(Breaking(1, 9, 7, SourceUnreadable("it is gone")), path, CONFIG, backbone=mock)
    assert (summary.steps, summary.complete, summary.damaged, summary.damage) == (3, False, True, "it is gone")
    with pytest.raises(SourceUnreadable, match="it is gone"):
        list(ingest(Breaking(1, 9, 0, SourceUnreadable("it is gone")), tmp_path / "t.safetensors", backbone=mock))


def test_damage_is_in_the_state_and_told_again_by_every_later_run(mock: MockBackbone, tmp_path: Path) -> None:
    path, source = tmp_path / "s.safetensors", Prepared(1, 9)
    source.damage = Damage(2, 0, 1.5, "2 frames could not be decoded, first at 1.50 s")
    *_, first = ingest(source, path, CONFIG, backbone=mock)
    assert first.damaged
    written = load_state(path)
    assert written.source is not None
    assert written.source["damage"] == source.damage.to_dict()
    assert describe(path)["stream"]["damage"] == source.damage.message
    # A finished source is not read again: only the state knows of the damage.
    *_, again = ingest(A, path, CONFIG, backbone=mock)
    assert (again.damaged, again.damage) == (True, source.damage.message)
    # The same holds after another source was appended.
    list(ingest(B, path, CONFIG, backbone=mock, append=True))
    *_, later = ingest(A, path, CONFIG, backbone=mock, append=True)
    assert later.damaged
    *_, undamaged = ingest(B, path, CONFIG, backbone=mock, append=True)
    assert not undamaged.damaged


def test_a_state_that_is_moved_away_after_a_commit_is_no_error(mock: MockBackbone, tmp_path: Path) -> None:
    path, moved = tmp_path / "s.safetensors", tmp_path / "moved.safetensors"
    for event in ingest(A, path, CONFIG, backbone=mock):
        if isinstance(event, Commit):
            path.rename(moved)
    assert isinstance(event, Summary)
    assert event.file_bytes == moved.stat().st_size


def test_a_run_over_a_file_ends_after_the_stream_time_it_was_told_and_goes_on(
    mock: MockBackbone, tmp_path: Path
) -> None:
    path = tmp_path / "s.safetensors"
    for reached_s in (2.0, 4.0, 5.0):
        *_, summary = ingest(A, path, CONFIG, backbone=mock, live=LiveOptions(for_s=2.0))
        assert (summary.stream_time_s, summary.complete) == (reached_s, reached_s == 5.0)


@pytest.mark.parametrize(
    ("record", "options", "said"),
    [
        *((Every, {"seconds": value}, "cannot commit every") for value in (0, -1.0, math.nan, math.inf)),
        *((Every, {name: 0}, "cannot commit every") for name in ("n_steps", "wall_s")),
        (LiveOptions, {"stall_s": 0.0}, "stall_s is 0"),
        (LiveOptions, {"for_s": -1.0}, "for_s is -1"),
        (LiveOptions, {"on_pressure": "panic"}, "on_pressure is 'panic'"),
        *((IngestOptions, {"chunk": chunk}, "a chunk of") for chunk in (0, -1, 65)),
        (IngestOptions, {"append": True, "overwrite": True}, "start it over"),
    ],
)
def test_options_that_make_no_sense_are_refused(record, options, said):
    with pytest.raises(ConfigError, match=said):
        record(**options)
