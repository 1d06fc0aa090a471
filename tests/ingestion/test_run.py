"""`ingest` as a program calls it: its events, one model for many sources, and a state whatever ends it."""

import math
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import ConfigError, SourceUnreadable, StateCorrupt, StateError
from protokv.ingestion import (
    NEVER,
    Commit,
    Event,
    Every,
    IngestOptions,
    LiveOptions,
    Progress,
    SourceNoted,
    Started,
    Summary,
    ingest,
    ingest_events,
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


def run(source: Any, path: Path | None, **options: Any) -> Generator[Event, None, None]:
    return ingest_events(source, path, CONFIG, backbone=MockBackbone(), **options)


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


def test_start_steps_commits_on_disk_and_end_are_events_and_the_state_has_the_name_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    events = []
    for event in run(A, None, every=Every(n_steps=2)):
        events.append(event)
        if isinstance(event, Commit):
            assert event.file_bytes > 0
            assert Reader.open("1.safetensors").header.clock.steps == event.steps
    kinds = [Started, Progress, Progress, Commit, Progress, Progress, Commit, Progress, Commit, Summary]
    assert [type(event) for event in events] == kinds
    assert [event.steps for event in events] == [0, 1, 2, 2, 3, 4, 4, 5, 5, 5]
    assert events[-1].state == "1.safetensors"
    assert load_state("1.safetensors").complete


def test_joined_recordings_are_watched_whole_noted_once_and_resumed_to_equal_bytes(tmp_path: Path) -> None:
    part = write(Clip([40 * i for i in range(100)], suffix="ts"), tmp_path / "a.ts")
    (joined := tmp_path / "b.ts").write_bytes(2 * part.read_bytes())
    events = list(run(joined, tmp_path / "whole.safetensors"))
    notes = [one.note for one in events if isinstance(one, SourceNoted)]
    assert notes == ["at 4.00 s another recording is joined on: times go on"]
    assert isinstance(end := events[-1], Summary)
    assert (end.stream_time_s, end.complete, end.damaged) == (8.0, True, False)
    for steps in (3, 6):
        path, asked = tmp_path / f"{steps}.safetensors", count()
        list(run(joined, path, should_stop=lambda a=asked, n=steps: next(a) >= n))
        assert load_state(path).clock.steps < 8
        list(run(joined, path))
        assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_settings_by_name_replace_those_of_a_record_of_options(path: Path) -> None:
    options = IngestOptions(config=CONFIG, backbone=MockBackbone(), keep=9, every=NEVER)
    assert ingest(A, path, options=options, every=Every(n_steps=1), keep=2).complete
    assert Reader.open(path).commits_s == [4.0, 5.0]
    with pytest.raises(TypeError, match="evry"):
        ingest(A, path, options=options, evry=NEVER)


def test_a_commit_that_fails_ends_the_ingest_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StateError("the disk is gone")

    monkeypatch.setattr(Store, "commit", refuse)
    seen: list[int] = []
    with pytest.raises(StateError, match="the disk is gone"):
        seen.extend(event.steps for event in run(Prepared(4, 200), path, every=Every(n_steps=3)))
    assert max(seen) == 3


def test_a_minute_of_the_clock_commits_by_default(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, commits, calls = 0.0, [], count()
    monkeypatch.setattr("protokv.ingestion.watching.time.perf_counter", lambda: now_s + 1e-6 * next(calls))
    for event in run(Prepared(5, 20), path):
        # A step takes 22 s, so the third is the first after a minute.
        now_s += 22.0 * isinstance(event, Progress)
        commits += [event.steps] if isinstance(event, Commit) else []
    assert commits == [3, 6, 9, 10]
    assert not NEVER.is_due(10**9, 1e9, 1e9)


@pytest.mark.parametrize("error", [RuntimeError("a cable"), KeyboardInterrupt(), None], ids=repr)
def test_watched_steps_are_saved_whatever_ends_the_run(error: BaseException | None, path: Path, tmp_path: Path) -> None:
    events = run(Breaking(1, 9, 7, error or MemoryError()), path)
    if error is None:
        while next(events).steps < 3:
            pass
        events.close()
    else:
        with pytest.raises(type(error)):
            list(events)
    assert (load_state(path).clock.steps, load_state(path).complete) == (3, False)
    list(run(A, path))
    list(run(A, tmp_path / "whole.safetensors"))
    assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("protokv.core.session.StepKV", RuntimeError("half a step")),
        ("protokv.ingestion.watching.to_state", StateCorrupt("a number is not finite")),
    ],
    ids=["an error within a step", "a state that cannot be loaded"],
)
def test_what_is_no_sound_state_does_not_replace_the_last_commit(
    broken: str, error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    events = run(A, path, every=Every(n_steps=2))
    while next(events).steps != 3:
        pass
    monkeypatch.setattr(broken, refuse)
    with pytest.raises(type(error), match=str(error)):
        list(events)
    assert load_state(path).clock.steps == 2


def test_a_source_that_ends_early_is_a_state_and_damage(path: Path, tmp_path: Path) -> None:
    gone = SourceUnreadable("it is gone")
    *_, summary = run(Breaking(1, 9, 7, gone), path)
    assert (summary.steps, summary.complete, summary.damaged, summary.damage) == (3, False, True, "it is gone")
    with pytest.raises(SourceUnreadable, match="it is gone"):
        list(run(Breaking(1, 9, 0, gone), tmp_path / "t.safetensors"))


def test_damage_is_in_the_state_and_told_again_by_every_later_run(path: Path) -> None:
    source = Prepared(1, 9)
    source.damage = Damage(2, 0, 1.5, "2 frames could not be decoded, first at 1.50 s")
    *_, first = run(source, path)
    assert load_state(path).source["damage"] == source.damage.to_dict()  # type: ignore[index]
    assert describe(path)["stream"]["damage"] == source.damage.message
    # A finished source is not read again: only the state knows of the damage, after another source too.
    *_, again = run(A, path)
    *_, other = run(B, path, append=True)
    *_, later = run(A, path, append=True)
    said = source.damage.message
    assert [(one.damaged, one.damage) for one in (first, again, other, later)] == [
        (True, said), (True, said), (False, ""), (True, said),
    ]  # fmt: skip


def test_a_state_that_is_moved_away_after_a_commit_is_no_error(path: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.safetensors"
    for event in run(A, path):
        if isinstance(event, Commit):
            path.rename(moved)
    assert isinstance(event, Summary)
    assert event.file_bytes == moved.stat().st_size


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
