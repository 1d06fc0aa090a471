"""`ingest` as a program calls it: its events, one model for many sources, and a state whatever ends
it.
"""

import gc
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from protokv.errors import ConfigError, SourceUnreadable, StateCorrupt, StateError
from protokv.ingestion import (
    COMMIT_NEVER,
    Commit,
    Every,
    IngestOptions,
    IngestProgress,
    IngestStarted,
    IngestSummary,
    LiveOptions,
    QuestionAnswered,
    SourceNoted,
    StandingQuestion,
    ingest,
    ingest_events,
)
from protokv.ingestion.options import IngestSettings
from protokv.state.describe import describe_state
from protokv.state.reader import StateReader, load_state
from protokv.state.sources import read_standing_answers
from protokv.stream.answer import Answer
from protokv.stream.session import Session
from protokv.texts import Keywords
from protokv.video import Frame, Source, SourceDamage
from protokv.video.source import FrameRequest
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.state.test_checkpoint import CONFIGS
from tests.video.conftest import Clip, write

A = Prepared(1, 9)
B = Prepared(2, 6)
CONFIG = CONFIGS["durable"]


def run(source: Any, path: Path | None, **options: Any) -> Generator[Any, None, None]:
    """Return the events of an ingest: a test knows by their order which is which."""
    return ingest_events(source, path, CONFIG, backbone=MockBackbone(), **options)


class Breaking(Prepared):
    """A source that fails after some frames."""

    def __init__(self, seed: int, n_frames: int, after: int, error: BaseException) -> None:
        super().__init__(seed, n_frames)
        self._after = after
        self._error = error

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        for i, frame in enumerate(super()._read(wanted)):
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
            assert StateReader.open("1.safetensors").header.clock.steps == event.steps
    step = IngestProgress
    kinds = [IngestStarted, step, step, Commit, step, step, Commit, step, Commit, IngestSummary]
    assert [type(event) for event in events] == kinds
    assert [event.steps for event in events] == [0, 1, 2, 2, 3, 4, 4, 5, 5, 5]
    assert events[-1].state == "1.safetensors"
    assert load_state("1.safetensors").complete


def test_settings_by_name_replace_those_of_a_record_of_options(path: Path) -> None:
    options = IngestOptions(config=CONFIG, backbone=MockBackbone(), keep=9, every=COMMIT_NEVER)
    assert ingest(A, path, options=options, every=Every(n_steps=1), keep=2).complete
    assert StateReader.open(path).commits_s == [4.0, 5.0]
    wrong: Keywords = {"evry": COMMIT_NEVER}
    with pytest.raises(TypeError, match="evry"):
        ingest(A, path, options=options, **wrong)


def test_a_minute_of_the_clock_commits_by_default(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    commits = []
    calls = count()
    monkeypatch.setattr(
        "protokv.ingestion.watching.time.perf_counter", lambda: now_s + 1e-6 * next(calls)
    )
    for event in run(Prepared(5, 20), path):
        # A step takes 22 s, so the third is the first after a minute.
        now_s += 22.0 * isinstance(event, IngestProgress)
        commits += [event.steps] if isinstance(event, Commit) else []
    assert commits == [3, 6, 9, 10]
    assert not COMMIT_NEVER.is_due(10**9, 1e9, 1e9)


@pytest.mark.parametrize("error", [RuntimeError("a cable"), KeyboardInterrupt(), None], ids=repr)
def test_watched_steps_are_saved_whatever_ends_the_run(
    error: BaseException | None, path: Path, tmp_path: Path
) -> None:
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
        ("protokv.core.prototypes.PrototypeMemory.apply", RuntimeError("half a step")),
        ("protokv.stream.session.Session.make_state", StateCorrupt("a number is not finite")),
        ("protokv.state.store.StateStore.commit", StateError("the disk is gone")),
    ],
    ids=["an error within a step", "a state that cannot be loaded", "no room"],
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
    seen = list[int]()
    with pytest.raises(type(error), match=str(error)):
        seen.extend(event.steps for event in events)
    assert max(seen, default=0) <= 4
    assert load_state(path).clock.steps == 2


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_source_that_ends_early_is_a_state_and_damage(
    path: Path, tmp_path: Path, chunk: int
) -> None:
    gone = SourceUnreadable("it is gone")
    *_, summary = run(Breaking(1, 9, 7, gone), path, chunk=chunk)
    assert (summary.steps, summary.complete, summary.damaged, summary.damage) == (
        3,
        False,
        True,
        "it is gone",
    )
    with pytest.raises(SourceUnreadable, match="it is gone"):
        list(run(Breaking(1, 9, 0, gone), tmp_path / "t.safetensors"))


def test_notes_are_events_and_damage_is_in_the_state_and_told_again_by_every_later_run(
    path: Path,
) -> None:
    source = Prepared(1, 9)
    source.damage = SourceDamage(2, 0, 1.5, "2 frames could not be decoded, first at 1.50 s")
    source.add_note("it has two tracks")
    *events, first = run(source, path)
    notes = [one.note for one in events if isinstance(one, SourceNoted)]
    assert notes == ["it has two tracks"]
    assert load_state(path).source["damage"] == source.damage.to_dict()  # type: ignore[index]
    assert describe_state(path)["stream"]["damage"] == source.damage.message
    # A finished source is not read again: only the state knows of the damage, after another source
    # too.
    *_, again = run(A, path)
    *_, other = run(B, path, append=True)
    *_, later = run(A, path, append=True)
    said = source.damage.message
    assert [(one.damaged, one.damage) for one in (first, again, other, later)] == [
        (True, said),
        (True, said),
        (False, ""),
        (True, said),
    ]


@pytest.mark.parametrize(
    ("record", "options", "said"),
    [
        *((Every, {"seconds": value}, "seconds is") for value in (0, math.nan, math.inf)),
        (LiveOptions, {"stall_s": 0.0}, "stall_s is 0"),
        (LiveOptions, {"on_pressure": "panic"}, "on_pressure is 'panic'"),
        *((IngestOptions, {"chunk": chunk}, "a chunk of") for chunk in (0, -1, 65)),
        (IngestOptions, {"append": True, "overwrite": True}, "start it over"),
        (StandingQuestion, {"text": "a", "every_s": 0.0}, "every_s is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    record: Callable[..., object], options: Keywords, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        record(**options)


@pytest.mark.parametrize(
    ("chunk", "times"), [(1, [3, 4, 6, 8, 9, 12, 12]), (4, [4, 4, 8, 8, 12, 12])]
)
def test_a_resumed_file_is_asked_at_the_same_times_and_its_state_has_equal_bytes(
    tmp_path: Path, chunk: int, times: list[int]
) -> None:
    whole = tmp_path / "whole.safetensors"
    source = Prepared(1, 24)
    asked = (
        StandingQuestion("what is it", 3.0),
        StandingQuestion("red or not", 4.0, ("red", "green")),
    )
    found = [
        one
        for one in run(source, whole, ask=asked, chunk=chunk)
        if isinstance(one, QuestionAnswered)
    ]
    assert [(one.stream_time_s, one.late_s) for one in found] == [(at_s, None) for at_s in times]
    assert [one["answer"] for one in describe_state(whole)["stream"]["answers"]] == [
        one.answer for one in found
    ]
    for steps in range(1, 12, 3):
        path = tmp_path / f"{steps}.safetensors"
        calls = count()
        # Stopped, and then closed at the first event after the next step.
        stop: Any = lambda n=steps, c=calls: next(c) >= n  # noqa: E731
        list(run(source, path, ask=asked, chunk=chunk, should_stop=stop))
        # A state goes on with its own chunk.
        events = run(source, path, ask=asked, chunk=None)
        _ = next(events)
        _ = next(events)
        events.close()
        list(run(source, path, ask=asked, chunk=None))
        assert path.read_bytes() == whole.read_bytes()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What sessions answer in turn, by question."""
    answers: dict[str, list[str]] = {}

    def answer(self: Session, question: str, *_: Any, **__: Any) -> Generator[str, None, Answer]:
        yield (text := answers[question].pop(0))
        return Answer(question, text, self.clock.stream_time_s, 1.0, 1.0, 1, 1, -0.5)

    monkeypatch.setattr(Session, "begin_answer", answer)
    return answers


def test_an_answer_that_equals_the_last_one_is_no_news_however_much_else_was_answered(
    path: Path, says: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protokv.ingestion.asking.MOST_STANDING_ANSWERS", 4)
    says |= {"quiet": [*["Yes"] * 8, "yes", "no"], "other": [*map(str, range(9)), "x" * 900]}
    asked = StandingQuestion("quiet", 1.0, on_change=True), StandingQuestion("other", 1.0)
    found = [
        (one.stream_time_s, one.answer)
        for one in run(Prepared(1, 20), path, ask=asked)
        if isinstance(one, QuestionAnswered)
    ]
    assert [one for one in found if not one[1][0].isdigit()][:-1] == [(1, "Yes"), (10, "no")]
    kept = [(one.stream_time_s, one.answer) for one in read_standing_answers(load_state(path))]
    assert kept == [(8, "7"), (9, "8"), (10, "no"), (10, "x" * 500)]


def test_the_answers_are_those_of_the_stream_and_hold_no_nonsense(
    path: Path, says: dict[str, list[str]]
) -> None:
    says["a"] = ["one", "two"]
    # Other sources go on with them, without a question too.
    for source, every_s in ((A, 3.0), (B, None), (Prepared(3, 6), 5.0)):
        list(
            run(source, path, ask=(StandingQuestion("a", every_s),) if every_s else (), append=True)
        )
    state = load_state(path)
    assert [(one.stream_time_s, one.answer) for one in read_standing_answers(state)] == [
        (3, "one"),
        (10, "two"),
    ]
    assert not any("answers" in one for one in state.source["earlier"])  # type: ignore[index]
    with pytest.raises(StateCorrupt, match="source"):
        read_standing_answers(replace(state, source={"answers": [{"question": 3}]}))


def test_a_run_that_has_ended_keeps_no_session_and_no_source(path: Path, tmp_path: Path) -> None:
    # They would hold their memory and their threads until Python looks for cycles.
    video = write(Clip([0, 1000, 2000]), tmp_path / "v.mp4")
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(one, Session | Source) for one in gc.get_objects())
        ingest(video, path, CONFIG, backbone=MockBackbone())
        assert sum(isinstance(one, Session | Source) for one in gc.get_objects()) == before
    finally:
        gc.enable()


def test_the_keywords_of_ingest_have_the_names_and_types_of_its_options() -> None:
    options = get_type_hints(IngestOptions)
    del options["config"]  # a parameter of its own
    assert get_type_hints(IngestSettings) == options
