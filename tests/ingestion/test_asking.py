"""Standing questions: when they are asked, what the state keeps of them, and what a live source loses by them."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from protokv.core.session import Answer, Session
from protokv.errors import ConfigError, StateCorrupt
from protokv.ingestion import Answered, StandingQuestion, ingest_events
from protokv.memories import DurableConfig
from protokv.state.describe import describe
from protokv.state.reader import load_state
from protokv.state.sources import read_answers
from protokv.video import Frame
from tests.cameras import World, gone
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared

CONFIG = DurableConfig(budget=40)
FREE, CHOICE = StandingQuestion("what is it", 3.0), StandingQuestion("red or not", 4.0, ("red", "green"))


def run(source: Any, path: Path, *asked: StandingQuestion, **options: Any) -> list[Answered]:
    events = ingest_events(source, path, CONFIG, backbone=MockBackbone(), ask=asked, **options)
    return [one for one in events if isinstance(one, Answered)]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let sessions give these answers in turn, by question, and do something meanwhile."""

    def script(answers: dict[str, list[str]], meanwhile: Callable[[], object] = lambda: None) -> None:
        def ask(self: Session, question: str, *_: Any, **__: Any) -> Answer:
            meanwhile()
            return Answer(question, answers[question].pop(0), self.clock.stream_time_s, 1.0, 1.0, 1, 1, -0.5)

        monkeypatch.setattr(Session, "ask", ask)

    return script


@pytest.mark.parametrize(("chunk", "times"), [(1, [3, 4, 6, 8, 9, 12, 12]), (4, [4, 4, 8, 8, 12, 12])])
def test_a_resumed_file_is_asked_at_the_same_times_to_equal_bytes(tmp_path: Path, chunk: int, times: list[int]) -> None:
    whole, asked = tmp_path / "whole.safetensors", (FREE, CHOICE)
    found = run(Prepared(1, 24), whole, *asked, chunk=chunk)
    assert [(one.stream_time_s, one.late_s) for one in found] == [(at_s, None) for at_s in times]
    assert [one["answer"] for one in describe(whole)["stream"]["answers"]] == [one.answer for one in found]
    for steps in range(1, 12, 3):
        path, calls = tmp_path / f"{steps}.safetensors", count()
        # Stopped, and then closed at the first event after the next step.
        run(Prepared(1, 24), path, *asked, chunk=chunk, should_stop=lambda n=steps, c=calls: next(c) >= n)
        events = ingest_events(Prepared(1, 24), path, CONFIG, backbone=MockBackbone(), ask=asked, chunk=chunk)  # type: ignore[arg-type]
        _, _ = next(events), next(events)
        events.close()
        assert not load_state(path).complete or steps > 7
        run(Prepared(1, 24), path, *asked, chunk=chunk)
        assert path.read_bytes() == whole.read_bytes()


def test_an_answer_that_equals_the_last_one_is_no_news_however_much_else_was_answered(
    tmp_path: Path, says: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protokv.ingestion.asking.MOST_KEPT", 4)
    path, quiet, other = tmp_path / "s.safetensors", StandingQuestion("quiet", 1.0, on_change=True), "other"
    says({"quiet": [*["Yes"] * 8, "yes", "no"], other: [*map(str, range(9)), "x" * 900]})
    found = run(Prepared(1, 20), path, quiet, StandingQuestion(other, 1.0))
    assert [(one.stream_time_s, one.answer) for one in found if one.question == "quiet"] == [(1, "Yes"), (10, "no")]
    kept = read_answers(load_state(path))
    assert [(one.stream_time_s, one.answer[:3]) for one in kept] == [(8, "7"), (9, "8"), (10, "no"), (10, "xxx")]
    assert len(kept[-1].answer) == 500


def test_the_answers_are_those_of_the_stream_and_hold_no_nonsense(tmp_path: Path, says: Callable[..., None]) -> None:
    path = tmp_path / "s.safetensors"
    says({"a": ["one", "two"]})
    # Other sources go on with them, without a question too.
    for seed, asked in enumerate(([StandingQuestion("a", 3.0)], [], [StandingQuestion("a", 4.0)])):
        run(Prepared(seed, 6), path, *asked, append=True)
    state = load_state(path)
    assert [(one.stream_time_s, one.answer) for one in read_answers(state)] == [(3, "one"), (8, "two")]
    assert not any("answers" in one for one in state.source["earlier"])  # type: ignore[index]
    with pytest.raises(StateCorrupt, match="source"):
        read_answers(replace(state, source={"answers": [{"question": 3}]}))
    for wrong, said in ((("red", "red ring"), "begin alike"), (("red",), "single choice")):
        with pytest.raises(ConfigError, match=said):
            run(Prepared(1, 6), tmp_path / "t.safetensors", StandingQuestion("a b", choices=wrong))


def test_a_live_source_says_how_late_an_answer_was_and_what_it_cost(tmp_path: Path, says: Callable[..., None]) -> None:
    asked = threading.Event()

    class Pausing(World):
        def connect(self, *arguments: Any, **options: Any) -> Any:
            connection = super().connect(*arguments, **options)
            frames = connection.frames

            def pause(**how: Any) -> Iterator[Frame]:
                for number, frame in enumerate(frames(**how)):
                    # Five of forty seconds come before the first answer, all others while it is made.
                    assert number != 10 or asked.wait(30)
                    yield frame

            connection.frames = pause  # type: ignore[method-assign]
            return connection

    world = Pausing([400, gone()])
    says({"a": ["x"] * 4}, lambda: (asked.set(), world.idle.wait(30)))
    with world.source(on_pressure="drop") as source:
        stop = world.watched(source)
        found = run(source, tmp_path / "s.safetensors", StandingQuestion("a", 5.0), should_stop=stop)
        # Eight steps have room, and 27 are dropped: the next one is of 0:33.
        said = [(one.stream_time_s, one.late_s, one.frames_dropped) for one in found]
        assert said == [(5.0, 35.0, 54), (33.0, 7.0, 0), (35.0, 5.0, 0), (40.0, 0.0, 0)]
        assert source.log.frames_dropped == 54
