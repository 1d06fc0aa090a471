"""A live source in a state: its clock, its losses, dropped frames, and how it goes on after a run; its mailbox."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import SourceDenied, SourceError, SourceNotFound, SourceUnreadable, StateMismatch
from protokv.ingestion import (
    Commit,
    Every,
    FramesDropped,
    LiveOptions,
    Progress,
    SourceLost,
    SourceRecovered,
    Started,
    Summary,
    ingest,
)
from protokv.ingestion.live import ConnectionEnd, Mailbox, backoff
from protokv.memories import DurableConfig
from protokv.state.reader import Reader
from protokv.state.sources import SourcePart, WallClockLog
from protokv.video.sampling import Step
from tests.cameras import EPOCH, World, gone
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared

CONFIG = DurableConfig(budget=40)


def run(world: World, path: Path, *, until: int | None = None, **options: Any) -> list[Any]:
    """Ingest until the world has nothing more to give, or until this many steps were watched."""
    live = {name: options.pop(name) for name in LiveOptions.__dataclass_fields__ if name in options}
    text = options.pop("text", "rtsp://admin:s3cret@camera/1")
    events: list[Any] = []

    def enough() -> bool:
        return sum(isinstance(one, Progress) for one in events) >= (until or 0)

    with world.source(text, **live) as source:
        stop = world.watched(source) if until is None else enough
        options = {"every": Every(n_steps=10**6), "should_stop": stop, **options}
        for event in ingest(source, path, CONFIG, backbone=MockBackbone(), **options):
            events.append(event)
    return events


def log_of(path: Path) -> WallClockLog:
    found = WallClockLog.read(Reader.open(path).header.source)
    assert found is not None
    return found


def test_stream_time_goes_on_with_real_time_across_a_loss_and_the_gap_is_on_record(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    world = World([100, gone()], [gone()], [("away", 60.0), 100, gone()])
    events = run(world, path)
    # A loss is one event, however often it is tried again.
    news = [type(one) for one in events if isinstance(one, SourceLost | SourceRecovered)]
    assert news == [SourceLost, SourceRecovered, SourceLost]
    assert world.connections > 3
    lost, back = (next(one for one in events if isinstance(one, kind)) for kind in (SourceLost, SourceRecovered))
    assert (lost.stream_time_s, lost.why) == (10.0, "rtsp://camera/1 is gone")
    assert (back.stream_time_s, back.gap_s) == (70.0, 60.0)
    times = [one.stream_time_s for one in events if isinstance(one, Progress)]
    assert times == [*range(1, 11), *range(71, 81)]
    found = log_of(path)
    assert [(one.from_s, one.to_s) for one in found.gaps] == [(10.0, 70.0), (80.0, None)]
    assert found.gaps_in_all == 2
    assert found.anchors == [(0.0, EPOCH)]
    assert found.stream_time(EPOCH + 75.0) == 75.0
    assert [one.frames_dropped for one in events if isinstance(one, Summary)] == [0]


def test_waiting_for_a_camera_at_the_start_is_one_loss_and_no_gap(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    events = run(World([("away", 7.0), gone()], [("away", 5.0), 50, gone()]), path)
    news = [(type(one), one.stream_time_s) for one in events if isinstance(one, SourceLost | SourceRecovered)]
    assert news == [(SourceLost, 0.0), (SourceRecovered, 0.0), (SourceLost, 5.0)]
    assert log_of(path).gaps_in_all == 1


@pytest.mark.parametrize(
    ("text", "options", "attempt", "pauses"),
    [
        ("tcp://camera:1?listen=1", {}, [("away", 4.0), gone()], False),
        ("tcp://camera:1?listen=1", {}, [50, gone()], False),
        ("rtmp://camera/live/a", {"listen": "1"}, [50, gone()], False),
        ("tcp://camera:1?listen=1", {}, [gone("Address already in use")], True),
        ("tcp://camera:1", {}, [("away", 4.0), gone()], True),
    ],
)
def test_a_listening_source_has_waited_and_listens_again_at_once(
    text: str, options: Any, attempt: list[Any], pauses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(*(list(attempt) for _ in range(3)))
    paused: list[int] = []

    def counted(*_: float) -> Iterator[float]:
        while True:
            paused.append(world.connections)
            yield 1e-3

    monkeypatch.setattr("protokv.ingestion.live.backoff", counted)
    run(world, tmp_path / "s.safetensors", text=text, input=options)
    assert [one for one in paused if one <= 3] == ([1, 2, 3] if pauses else [])


def test_a_source_that_is_silent_is_lost(tmp_path: Path) -> None:
    world = World([50, ("quiet", 21.0), 50], [50])
    events = run(world, tmp_path / "s.safetensors", stall_s=20.0)
    lost = next(one for one in events if isinstance(one, SourceLost))
    assert (lost.stream_time_s, lost.why) == (5.0, "no frame for 20 s")
    assert log_of(tmp_path / "s.safetensors").gaps[0].to_s == 26.0


def test_a_silence_that_is_no_loss_is_a_gap_without_repeated_frames(tmp_path: Path) -> None:
    world = World([55, ("quiet", 12.0), 50])
    events = run(world, tmp_path / "s.safetensors", stall_s=20.0)
    steps = [one for one in events if isinstance(one, Progress)]
    gap = log_of(tmp_path / "s.safetensors").gaps[0]
    assert (gap.from_s, gap.to_s, gap.why) == (5.5, 17.5, "no frames came")
    # Five steps and a half one, which is filled; then what comes behind the gap.
    assert [one.stream_time_s for one in steps] == [1, 2, 3, 4, 5, 6, *[18.5 + i for i in range(5)]]
    assert not any(isinstance(one, SourceLost) and one.stream_time_s < 17 for one in events)


@pytest.mark.parametrize("away_s", [0.0, 86_400.0])
def test_a_later_run_goes_on_in_the_same_stream_after_a_gap(away_s: float, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    first = World([100, gone()])
    run(first, path, until=7)
    before = log_of(path)
    second = World([50, gone()], began_s=first.now_s + away_s)
    events = run(second, path)
    assert [one.how for one in events if isinstance(one, Started)] == ["continued"]
    times = [one.stream_time_s for one in events if isinstance(one, Progress)]
    assert len(times) == 5
    assert times[0] >= max(8.0, first.now_s + away_s)
    after = log_of(path)
    assert after.stream == before.stream
    assert after.anchors[0] == before.anchors[0]
    assert (after.gaps[0].from_s, after.gaps[0].why) == (7.0, "nobody watched")
    assert after.gaps[0].to_s == times[0] - 1.0
    # The size of the frames is that of the stream's first ones, whatever the camera sends by now.
    assert second.sizes[0] == (48, 32)


def test_another_camera_is_refused_and_may_be_watched_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    run(World([50, gone()]), path)
    with pytest.raises(StateMismatch, match=r"rtsp://other/1"):
        run(World([50, gone()]), path, text="rtsp://other/1")
    events = run(World([50, gone()]), path, text="rtsp://other/1", append=True)
    assert [one.steps for one in events if isinstance(one, Started | Summary)] == [5, 10]
    assert len(Reader.open(path).header.source["earlier"]) == 1  # type: ignore[index]
    assert log_of(path).anchors[0][0] == 5.0


def test_a_file_can_be_appended_to_a_camera_and_a_camera_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    list(ingest(Prepared(1, 8), path, CONFIG, backbone=MockBackbone()))
    run(World([50, gone()]), path, append=True)
    *_, summary = ingest(Prepared(2, 8), path, CONFIG, backbone=MockBackbone(), append=True)
    assert summary.steps == 4 + 5 + 4


def test_commits_kept_are_moments_of_this_stream_and_of_no_other_of_the_same_camera(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    run(World([100, gone()]), path, every=Every(n_steps=2), keep=3)
    assert Reader.open(path).commits_s == [6.0, 8.0, 10.0]
    run(World([100, gone()], began_s=100.0), path, every=Every(n_steps=2), keep=3, until=4)
    assert len(Reader.open(path).commits_s) == 3
    run(World([30, gone()], began_s=100.0), path, overwrite=True)
    assert Reader.open(path).commits_s == [3.0]


def test_a_source_that_is_given_up_leaves_a_state_and_damage(tmp_path: Path) -> None:
    world = World([50, gone()])
    *_, summary = run(world, tmp_path / "s.safetensors", give_up_s=0.0)
    assert (summary.steps, summary.damaged, summary.damage) == (5, True, "rtsp://camera/1 is gone")


@pytest.mark.parametrize("kind", [SourceNotFound, SourceDenied])
def test_a_wrong_address_is_an_error_at_once_unless_it_was_right_before(
    kind: type[SourceError], tmp_path: Path
) -> None:
    with pytest.raises(kind):
        run(World([kind("nothing is at /dev/video9")]), tmp_path / "s.safetensors")
    assert not (tmp_path / "s.safetensors").exists()
    *_, summary = run(World([50, gone()], [kind("it restarts")], [50, gone()]), tmp_path / "s.safetensors")
    assert summary.steps == 10
    *_, summary = run(World([kind("it restarts")], [50, gone()], began_s=60.0), tmp_path / "s.safetensors")
    assert summary.steps == 15


def test_it_can_be_stopped_while_it_waits_for_a_frame_and_ends_by_itself_when_told(tmp_path: Path) -> None:
    world = World()
    events = run(world, tmp_path / "s.safetensors")
    assert [type(one) for one in events] == [Started, SourceLost, Commit, Summary]
    with pytest.raises(SourceUnreadable, match="no frame"):
        run(World(), tmp_path / "t.safetensors", should_stop=lambda: False, for_s=0.05)
    *_, summary = run(World([10_000]), tmp_path / "u.safetensors", should_stop=lambda: False, for_s=20.0)
    assert (summary.stream_time_s, summary.complete, summary.damaged) == (20.0, True, False)


def test_live_sources_are_committed_by_their_own_interval_and_when_they_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protokv.ingestion.run.LIVE", Every(n_steps=3))
    events = run(World([70, gone()]), tmp_path / "s.safetensors", every=None)
    # A loss commits too, so that a question meanwhile is about all there was.
    assert [one.steps for one in events if isinstance(one, Commit)][:3] == [3, 6, 7]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 30)), min_size=1, max_size=8), st.sampled_from([1.0, 2.0, 3.7])
)
def test_no_frame_is_sampled_twice_and_time_never_runs_back(parts: list[Any], fps: float) -> None:
    scripts = [[n, ("quiet", quiet_s), n, gone()] for n, quiet_s in parts]
    world = World(*scripts)
    with world.source(stall_s=1e9, retry_s=(1e-6, 1e-6)) as source:
        # The camera refuses every connection after its scripts: that is the end, and the source is tried for ever.
        steps = source.steps(fps, 1, SourcePart(), 3.0, world.watched(source))
        items = [one for one in steps if one is not None]
    times = [one.time_s if isinstance(one, Step) else one.stream_time_s for one in items]
    assert times[0] >= 3.0 - 1 / fps
    assert times == sorted(times)
    slots = [round(one.time_s * fps) for one in items if isinstance(one, Step)]
    assert all(b > a for a, b in itertools.pairwise(slots))
    assert len({one.images.tobytes() for one in items if isinstance(one, Step)}) == len(slots)


def test_a_slow_model_drops_the_oldest_frames_and_tells_both_rates_once(tmp_path: Path) -> None:
    world, path = World([3000, gone()]), tmp_path / "s.safetensors"
    source = world.source(on_pressure="drop")
    events: list[Any] = []
    steps = source.steps
    source.steps = lambda *a, **k: _late(world, steps(*a, **k))  # type: ignore[method-assign]
    with source:
        # The model takes its first step when the camera has sent everything.
        for event in ingest(source, path, CONFIG, backbone=MockBackbone(), should_stop=lambda: len(events) > 12):
            events.append(event)
    *_, summary = events
    assert summary.frames_dropped > 500
    assert log_of(path).frames_dropped == summary.frames_dropped
    slow = [one for one in events if isinstance(one, FramesDropped)]
    assert len(slow) == 1
    assert slow[0].stream_fps > slow[0].watched_fps > 0
    assert max(one.frames_dropped for one in events if isinstance(one, Progress)) == summary.frames_dropped
    # The newest frames are left.
    assert summary.stream_time_s > 295.0


def _late(world: World, steps: Any) -> Any:
    for i, step in enumerate(steps):
        if i == 0:
            assert world.idle.wait(20.0)
        yield step


def step(index: int) -> Step:
    return Step(index, float(index), np.zeros((2, 1, 1, 3), np.uint8), ("none", "none"))


@given(st.lists(st.sampled_from(["step", "news", "take"]), max_size=60), st.integers(1, 5))
def test_the_oldest_step_is_dropped_and_news_never(actions: list[str], room: int) -> None:
    mailbox, model, dropped = Mailbox(room, wait=False), list[Any](), 0
    for index, action in enumerate(actions):
        if action == "take":
            assert mailbox.get(0.0) is (model.pop(0) if model else None)
            continue
        item = step(index) if action == "step" else ConnectionEnd(index, "lost")
        waiting = [n for n, one in enumerate(model) if isinstance(one, Step)]
        if action == "step" and len(waiting) == room:
            del model[waiting[0]]
            dropped += 2
        mailbox.put(item)
        model.append(item)
        assert mailbox.dropped == dropped
    assert all(mailbox.get(0.0) is one for one in model)
    assert mailbox.get(0.0) is None


def test_a_waiting_sender_goes_on_when_there_is_room_and_when_the_mailbox_closes() -> None:
    mailbox = Mailbox(2, wait=True)
    thread = threading.Thread(target=lambda: [mailbox.put(step(index)) for index in range(6)], daemon=True)
    thread.start()
    assert [mailbox.get(20.0).index for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
    mailbox.close()
    thread.join(20.0)
    assert not thread.is_alive()
    assert mailbox.dropped == 0


@pytest.mark.parametrize(("draw", "part"), [(0.0, 0.5), (1.0, 1.0), (0.5, 0.75)])
def test_pauses_double_up_to_the_longest(draw, part):
    pauses = itertools.islice(backoff(1.0, 10.0, lambda: draw), 6)
    assert list(pauses) == [n * part for n in (1, 2, 4, 8, 10, 10)]
