"""A live source in a state: its clock, its losses, dropped frames, and how it goes on later."""

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import (
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnreadable,
    StateMismatch,
)
from protokv.ingestion import (
    Commit,
    Every,
    FramesDropped,
    IngestProgress,
    IngestStarted,
    IngestSummary,
    LiveOptions,
    QuestionAnswered,
    SourceLost,
    SourceRecovered,
    StandingQuestion,
    asking,
    ingest,
    ingest_events,
)
from protokv.memories import DurableConfig
from protokv.state.reader import StateReader
from protokv.state.sources import StreamSegment, WallClockLog
from protokv.stream.together import ask_together
from protokv.texts import Keywords
from protokv.video.sampling import VideoStep
from tests.cameras import EPOCH, World, gone
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared

CONFIG = DurableConfig(budget=40)
NEWS = SourceLost | SourceRecovered
WHY = "rtsp://camera/1 is gone"


def run(world: World, path: Path, *, until: int | None = None, **options: Any) -> list[Any]:
    """Ingest until the world has nothing more to give, or until this many steps were watched."""
    live = {name: options.pop(name) for name in LiveOptions.__dataclass_fields__ if name in options}
    events: list[Any] = []
    with world.source(options.pop("text", "rtsp://admin:s3cret@camera/1"), **live) as source:
        watched = world.watched(source)
        stop = watched if until is None else lambda: len(times_of(events)) >= until
        options = {"every": Every(n_steps=10**6), "should_stop": stop, **options}
        for event in ingest_events(source, path, CONFIG, backbone=MockBackbone(), **options):
            events.append(event)
    return events


def times_of(events: list[Any]) -> list[float]:
    return [one.stream_time_s for one in events if isinstance(one, IngestProgress)]


def log_of(path: Path) -> WallClockLog:
    found = WallClockLog.read(StateReader.open(path).header.source)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("script", "news", "times", "gaps"),
    [
        # A loss is one event, however often it is tried again.
        (
            [[100, gone()], [gone()], [("away", 60.0), 100, gone()]],
            [(SourceLost, 10.0), (SourceRecovered, 70.0), (SourceLost, 80.0)],
            [*range(1, 11), *range(71, 81)],
            [(10.0, 70.0, WHY), (80.0, None, WHY)],
        ),
        # Waiting at the start is no gap.
        (
            [[("away", 7.0), gone()], [("away", 5.0), 50, gone()]],
            [(SourceLost, 0.0), (SourceRecovered, 0.0), (SourceLost, 5.0)],
            range(1, 6),
            [(5.0, None, WHY)],
        ),
        (
            [[50, ("quiet", 21.0), 50], [50]],
            [(SourceLost, 5.0), (SourceRecovered, 26.0), (SourceLost, 31.0)],
            [*range(1, 6), *range(27, 32)],
            [(5.0, 26.0, "no frame for 20 s"), (31.0, None, "the source ended")],
        ),
        # Five steps and a half one, which is filled; then what comes behind the silence.
        (
            [[55, ("quiet", 12.0), 50]],
            [(SourceLost, 22.5)],
            [*range(1, 7), *(18.5 + i for i in range(5))],
            [(22.5, None, "the source ended")],
        ),
    ],
    ids=["lost", "late", "silent", "quiet"],
)
def test_stream_time_goes_on_with_real_time_across_a_loss_and_the_gap_is_on_record(
    script: Any, news: Any, times: Any, gaps: Any, path: Path
) -> None:
    events = run(World(*script), path)
    assert [(type(one), one.stream_time_s) for one in events if isinstance(one, NEWS)] == news
    assert times_of(events) == [*times]
    found = log_of(path)
    assert [(one.from_s, one.to_s, one.why) for one in found.gaps] == gaps
    assert found.gaps_in_all == len(gaps)
    assert len(found.anchors) == 1
    assert [one.frames_dropped for one in events if isinstance(one, IngestSummary)] == [0]


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0, 30.0, -5.0])
def test_a_clock_that_is_set_is_noted_at_the_next_commit_and_a_slow_model_is_not(
    set_by_s: float,
) -> None:
    world = World()
    source = world.source()
    wrong_s = -set_by_s
    source.now = lambda: EPOCH + world.now_s + wrong_s
    # Each commit comes five seconds after the frame that it holds.
    for stream_s in range(0, 60, 10):
        world.now_s = stream_s + 5.0 * (stream_s > 0)
        if stream_s == 30:
            wrong_s = 0.0
        found = WallClockLog.read(source.record(float(stream_s)))
    assert found is not None
    assert found.anchors == [(0.0, EPOCH - set_by_s), (30.0, EPOCH + 30.0)]
    assert found.stream_time(EPOCH + 45.0) == 45.0
    # So is a time just before, unless the wrong clock showed it as well.
    assert found.stream_time(EPOCH + 25.0) == (20.0 if set_by_s == -5.0 else 25.0)


def test_a_reader_that_does_not_come_back_is_left_and_the_source_is_connected_anew(
    path: Path,
) -> None:
    """As of MPEG-TS whose pictures get another PID: FFmpeg reads on, and PyAV gives nothing."""

    class Stuck(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            world.now_s += 60.0
            return super().wait(timeout)

    never = Stuck()
    world = World([50, never], [50, gone()])
    events = run(world, path)
    never.set()
    news: list[Any] = [one for one in events if isinstance(one, NEWS)]
    assert [type(one) for one in news] == [SourceLost, SourceRecovered, SourceLost]
    lost, back, _ = news
    assert lost.stream_time_s == 5.0
    assert "another PID" in lost.why
    assert (back.stream_time_s, back.gap_s) == (65.0, 60.0)
    assert times_of(events) == [*range(1, 6), *range(66, 71)]
    assert [(one.from_s, one.to_s) for one in log_of(path).gaps] == [(5.0, 65.0), (70.0, None)]


def test_an_attempt_that_takes_longer_than_the_pause_is_followed_by_the_next_at_once(
    path: Path,
) -> None:
    # Such as one that waits for a publisher. A pause in this test would be of minutes.
    world = World(*([("away", 500.0), gone()] for _ in range(3)))
    run(world, path, retry_s=(200.0, 400.0))
    assert world.connections == 4


@pytest.mark.parametrize("away_s", [0.0, 86_400.0])
def test_a_later_run_goes_on_in_the_same_stream_after_a_gap(away_s: float, path: Path) -> None:
    first = World([100, gone()])
    run(first, path, until=7)
    before = log_of(path)
    second = World([50, gone()], began_s=first.now_s + away_s)
    events = run(second, path)
    assert [one.how for one in events if isinstance(one, IngestStarted)] == ["continued"]
    times = times_of(events)
    after = log_of(path)
    assert len(times) == 5
    assert times[0] >= max(8.0, first.now_s + away_s)
    assert (after.stream, after.anchors[0]) == (before.stream, before.anchors[0])
    gap = after.gaps[0]
    assert (gap.from_s, gap.to_s, gap.why) == (7.0, times[0] - 1.0, "nobody watched")
    # The size of the frames is that of the stream's first ones, whatever the camera sends by now.
    assert second.sizes[0] == (48, 32)


def test_cameras_and_files_may_be_watched_one_behind_the_other(path: Path) -> None:
    run(World([50, gone()]), path)
    with pytest.raises(StateMismatch, match=r"rtsp://other/1"):
        run(World([50, gone()]), path, text="rtsp://other/1")
    events = run(World([50, gone()]), path, text="rtsp://other/1", append=True)
    assert [one.steps for one in events if isinstance(one, IngestStarted | IngestSummary)] == [
        5,
        10,
    ]
    assert len(StateReader.open(path).header.source["earlier"]) == 1  # type: ignore[index]
    assert log_of(path).anchors[0][0] == 5.0
    summary = ingest(Prepared(1, 8), path, CONFIG, backbone=MockBackbone(), append=True)
    assert summary.steps == 14
    assert run(World([50, gone()]), path, append=True)[-1].steps == 19


@pytest.mark.parametrize("kind", [SourceNotFound, SourceDenied])
def test_a_wrong_address_is_an_error_and_a_right_one_is_tried_again(
    kind: type[SourceError], path: Path
) -> None:
    with pytest.raises(kind):
        run(World([kind("nothing is at /dev/video9")]), path)
    assert not path.exists()
    assert run(World([50, gone()], [kind("it restarts")], [50, gone()]), path)[-1].steps == 10
    assert run(World([kind("it restarts")], [50, gone()], began_s=60.0), path)[-1].steps == 15
    *_, given_up = run(World([50, gone()], began_s=120.0), path, give_up_s=0.0)
    assert (given_up.steps, given_up.damaged, given_up.damage) == (
        20,
        True,
        "rtsp://camera/1 is gone",
    )


def test_it_can_be_stopped_while_it_waits_for_a_frame_and_ends_by_itself_when_told(
    path: Path, tmp_path: Path
) -> None:
    assert [type(one) for one in run(World(), path)] == [
        IngestStarted,
        SourceLost,
        Commit,
        IngestSummary,
    ]
    never: Keywords = {"should_stop": lambda: False}
    with pytest.raises(SourceUnreadable, match="no frame"):
        run(World(), tmp_path / "t.safetensors", for_s=0.05, **never)
    *_, summary = run(World([10_000]), tmp_path / "u.safetensors", for_s=20.0, **never)
    assert (summary.stream_time_s, summary.complete, summary.damaged) == (20.0, True, False)


def test_live_sources_have_their_own_interval_and_a_loss_commits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protokv.ingestion.run.COMMIT_WHEN_LIVE", Every(n_steps=3))
    events = run(World([70, gone()]), path, every=None)
    # A loss commits too, so that a question meanwhile is about all there was.
    assert [one.steps for one in events if isinstance(one, Commit)][:3] == [3, 6, 7]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 30)), min_size=1, max_size=8),
    st.sampled_from([1.0, 2.0, 3.7]),
)
def test_no_frame_is_sampled_twice_and_time_never_runs_back(parts: list[Any], fps: float) -> None:
    world = World(*([n, ("quiet", quiet_s), n, gone()] for n, quiet_s in parts))
    with world.source(stall_s=1e9, retry_s=(1e-6, 1e-6)) as source:
        # The camera refuses every connection after its scripts, and the source is tried for ever.
        steps = source.steps(fps, 1, StreamSegment(), 3.0, world.watched(source))
        items: list[Any] = [one for one in steps if one is not None]
    times = [one.time_s if isinstance(one, VideoStep) else one.stream_time_s for one in items]
    assert times[0] >= 3.0 - 1 / fps
    assert times == sorted(times)
    slots = [round(one.time_s * fps) for one in items if isinstance(one, VideoStep)]
    assert all(b > a for a, b in itertools.pairwise(slots))
    assert len({one.images.tobytes() for one in items if isinstance(one, VideoStep)}) == len(slots)


def test_an_answer_to_a_standing_question_says_how_late_it_was_and_what_it_cost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Five of forty seconds come before the first answer, all others while it is made; eight steps
    # have room.
    asked = threading.Event()
    ask = ask_together
    world = World([50, asked, 350, gone()])

    def wait(*arguments: Any, **options: Any) -> Any:
        asked.set()
        assert world.idle.wait(30)
        return ask(*arguments, **options)

    monkeypatch.setattr(asking, "ask_together", wait)
    events = run(world, path, on_pressure="drop", ask=(StandingQuestion("what is it", 5.0),))
    said = [
        (one.stream_time_s, one.late_s, one.frames_dropped)
        for one in events
        if isinstance(one, QuestionAnswered)
    ]
    assert said == [(5.0, 35.0, 54), (33.0, 7.0, 0), (35.0, 5.0, 0), (40.0, 0.0, 0)]
    # The rates are told once.
    (slow,) = [one for one in events if isinstance(one, FramesDropped)]
    assert slow.stream_fps > slow.watched_fps > 0
    progress = [one.frames_dropped for one in events if isinstance(one, IngestProgress)]
    assert max(progress) == events[-1].frames_dropped == log_of(path).frames_dropped == 54
    # News are never dropped.
    assert any(isinstance(one, SourceLost) for one in events)
