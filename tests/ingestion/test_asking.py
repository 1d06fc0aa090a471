"""Standing questions: when they are asked, what the state keeps of them, and what a live source loses by them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from protokv.core.session import Answer, Session
from protokv.errors import ConfigError, StateCorrupt
from protokv.ingestion import Answered, ingest_events
from protokv.ingestion.options import StandingQuestion
from protokv.memories import DurableConfig
from protokv.state.describe import describe
from protokv.state.reader import load_state
from protokv.state.sources import read_answers
from protokv.video import Frame
from tests.cameras import World, gone
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared

CONFIG = DurableConfig(budget=40)
FREE, CHOICE = (
    StandingQuestion("what is it", 3.0),
    StandingQuestion("red or green", 4.0, ("red", "green")),
)


def run(source: Any, path: Path, *asked: StandingQuestion, **options: Any) -> list[Answered]:
    events = list(ingest_events(source, path, CONFIG, backbone=MockBackbone(), ask=asked, **options))
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


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("closed", [False, True], ids=["stopped", "closed"])
def test_a_resumed_file_is_asked_at_the_same_times_and_its_state_has_equal_bytes(
    tmp_path: Path, chunk: int, closed: bool
) -> None:
    whole = run(Prepared(1, 24), tmp_path / "w.safetensors", FREE, CHOICE, chunk=chunk)
    times = [3, 4, 6, 8, 9, 12, 12] if chunk == 1 else [4, 4, 8, 8, 12, 12]
    assert [one.stream_time_s for one in whole] == times
    assert (whole[0].late_s, whole[0].frames_dropped, whole[1].evidence) == (None, 0, None)
    assert whole[1].probabilities == pytest.approx({"red": 0.5, "green": 0.5}, abs=0.3)
    expected = load_state(tmp_path / "w.safetensors").source["answers"]  # type: ignore[index]
    assert [one["answer"] for one in expected] == [one.answer for one in whole]
    for steps in range(1, 12, 3):
        path, asked = tmp_path / f"{steps}.safetensors", count()
        if closed:
            events = ingest_events(
                Prepared(1, 24), path, CONFIG, backbone=MockBackbone(), ask=(FREE, CHOICE), chunk=chunk
            )
            while getattr(next(events), "steps", 0) < steps:
                pass
            events.close()
        else:
            run(Prepared(1, 24), path, FREE, CHOICE, chunk=chunk, should_stop=lambda a=asked, n=steps: next(a) >= n)  # type: ignore[misc]
        assert not load_state(path).complete
        run(Prepared(1, 24), path, FREE, CHOICE, chunk=chunk)
        assert path.read_bytes() == (tmp_path / "w.safetensors").read_bytes()


def test_an_answer_that_equals_the_last_one_is_no_news_however_much_else_was_answered(
    tmp_path: Path, says: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protokv.ingestion.asking.MOST_KEPT", 4)
    path, quiet, other = tmp_path / "s.safetensors", StandingQuestion("quiet", 1.0, on_change=True), "other"
    says({"quiet": [*["Yes"] * 8, "yes. ", "no"], other: [*map(str, range(9)), "x" * 900]})
    found = run(Prepared(1, 20), path, quiet, StandingQuestion(other, 1.0))
    assert [(one.stream_time_s, one.answer) for one in found if one.question == "quiet"] == [(1, "Yes"), (10, "no")]
    kept = read_answers(load_state(path))
    assert [(one.stream_time_s, one.answer[:3]) for one in kept] == [(8, "7"), (9, "8"), (10, "no"), (10, "xxx")]
    assert (len(kept[-1].answer), len(found[-1].answer)) == (500, 900)


def test_the_answers_are_those_of_the_stream_and_hold_no_nonsense(tmp_path: Path, says: Callable[..., None]) -> None:
    path = tmp_path / "s.safetensors"
    says({"a": ["one", "two"]})
    run(Prepared(1, 6), path, StandingQuestion("a", 3.0))
    # Another source goes on with them, without a question too.
    run(Prepared(2, 6), path, append=True)
    run(Prepared(3, 6), path, StandingQuestion("a", 4.0), append=True)
    state = load_state(path)
    rows = describe(path)["stream"]["answers"]
    assert [(one["stream_time_s"], one["answer"], one["mean_logprob"]) for one in rows] == [
        (3, "one", -0.5),
        (8, "two", -0.5),
    ]
    assert not any("answers" in one for one in state.source["earlier"])  # type: ignore[index]
    with pytest.raises(StateCorrupt, match="source"):
        read_answers(replace(state, source={"answers": [{"question": 3}]}))


def test_a_live_source_says_how_late_an_answer_was_and_what_it_cost_and_waits_if_it_is_pressed(
    tmp_path: Path, says: Callable[..., None]
) -> None:
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
    says({"a": ["x"] * 3}, lambda: asked.set() or world.idle.wait(30))
    with world.source(on_pressure="drop") as source:
        how: Any = {"backbone": MockBackbone(), "should_stop": world.watched(source)}
        *events, summary = ingest_events(
            source, tmp_path / "s.safetensors", CONFIG, ask=[StandingQuestion("a", 5.0)], **how
        )
    found = [one for one in events if isinstance(one, Answered)]
    # Eight steps have room, and 27 are dropped. Then a question is due at 0:33, and waits until only four steps wait.
    said = [(one.stream_time_s, one.late_s, one.frames_dropped) for one in found]
    assert said == [(5.0, 35.0, 54), (36.0, 4.0, 0), (40.0, 0.0, 0)]
    assert summary.frames_dropped == 54


def test_what_no_model_can_be_asked_is_refused_before_anything_is_watched(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    for asked, said in (
        ([StandingQuestion("a b", choices=("red", "red ring"))], "begin with the same token"),
        ([FREE, replace(FREE, every_s=9.0)], "two standing questions are the same"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(Prepared(1, 6), path, *asked)
    assert not path.exists()
    for wrong, said in (
        ({"text": " "}, "empty"),
        ({"text": "a" * 501}, "more than 500"),
        ({"choices": ("a",)}, "1 choice"),
        ({"every_s": 0.0}, "cannot ask every 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            StandingQuestion(**{"text": "a", **wrong})
