"""Procedural streams: the questions stay true, and pressure and time are apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protokv.errors import ConfigError, SourceUnreadable
from protokv.mini.phrases import TYPES
from protokv.mini.questions import find_facts
from protokv.replay.question_types import find_type
from protokv.replay.questions import Question
from protokv.replay.streams import FileStream, Pressure, WorldStream, make_worlds, open_files

SAMPLE = Path(__file__).parents[2] / "samples" / "short" / "video.mp4"


@pytest.mark.parametrize("seed", range(6))
def test_every_question_has_its_answer_at_every_time_after_the_evidence(seed: int) -> None:
    stream = WorldStream(seed, 300, Pressure(20.0))
    world = stream._world
    assert {question.type for question in stream.questions} == {kind for kind in TYPES if find_type(kind).retrospective}
    for ask_s in (16.0, 60.0, 150.0, 300.0):
        for question in stream.questions:
            answers = {fact.answer for fact in find_facts(question.type, world.events_until(ask_s), ask_s)}
            assert question.answer in answers
            assert question.reference == "evidence"
            assert question.reference_s <= 16.0


def test_pressure_changes_what_comes_later_and_nothing_of_the_evidence() -> None:
    calm, busy = (WorldStream(3, 200, Pressure(rate)) for rate in (2.0, 30.0))
    early = [world._world.events_until(16.0) for world in (calm, busy)]
    assert early[0] == early[1]
    assert len(busy._world.events_until(200)) > 3 * len(calm._world.events_until(200))


def test_a_world_gives_the_steps_that_its_rendered_video_would() -> None:
    stream = WorldStream(5, 20, Pressure())
    steps = list(stream.steps(2.0, 2))
    assert [step.time_s for step in steps] == [float(s) for s in range(20)]
    assert np.array_equal(steps[7].images, stream._world.frames(7, 8))


def test_each_seed_gives_a_world_of_its_own() -> None:
    streams = make_worlds(range(7, 10), 60, Pressure(), per_type=1)
    assert [stream.name for stream in streams] == ["world-7", "world-8", "world-9"]


def test_a_stream_no_longer_than_its_evidence_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 s"):
        WorldStream(1, 16, Pressure())


def test_questions_go_to_the_video_that_they_name(tmp_path: Path) -> None:
    other = tmp_path / "other.mp4"
    other.write_bytes(SAMPLE.read_bytes())
    file = tmp_path / "q.jsonl"
    file.write_text(
        '{"question": "A?", "answer": "a", "ask_s": 1, "video": "other"}\n'
        '{"question": "B?", "answer": "b", "ask_s": 1, "video": "video.mp4"}\n'
    )
    streams = open_files([SAMPLE, other], file)
    assert [[question.text for question in stream.questions] for stream in streams] == [["B?"], ["A?"]]
    with pytest.raises(ConfigError, match="about other, which is none"):
        open_files([SAMPLE], file)
    file.write_text('{"question": "A?", "answer": "a", "ask_s": 1}\n')
    with pytest.raises(ConfigError, match="names no video"):
        open_files([SAMPLE, other], file)
    assert len(open_files([SAMPLE], file)[0].questions) == 1


def test_a_file_that_is_no_video_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "x.mp4").write_text("not a video")
    with pytest.raises(SourceUnreadable):
        FileStream(tmp_path / "x.mp4", [Question("1", "A?", "a", "", 0.0, "query")])
