"""Procedural streams: questions stay true, and distraction, time and place are independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from protokv.errors import ConfigError
from samples.worlds.phrases import GROUPS, ORDER_TYPES, TIME_TYPES, TYPES
from samples.worlds.pictures import PLACES, SHAPES
from samples.worlds.questions import find_facts
from samples.worlds.streams import Worlds, WorldStream, place_evidence, place_minutes


def make_world(seed: int, types: Sequence[str] = (), **settings: Any) -> WorldStream:
    """Make a stream of 300 seconds with the evidence at the start, unless the settings say
    otherwise.
    """
    return WorldStream(seed, Worlds(**{"before": 0} | settings), types)


@pytest.mark.parametrize("seed", range(2))
def test_questions_of_further_types_come_behind_the_others_and_keep_their_answers(
    seed: int,
) -> None:
    stream = make_world(seed, ORDER_TYPES, distractor_rate=5.0, before="mix")
    plain = make_world(seed, distractor_rate=5.0, before="mix").questions
    assert list(stream.questions[: len(plain)]) == list(plain)
    further = stream.questions[len(plain) :]
    assert {q.type for q in further} <= {kind for kind in ORDER_TYPES if kind in GROUPS}
    assert {"before", "middle_first", "middle_after"} <= {q.type for q in further}
    repeats = stream.world.repeats()
    seen = [e for e in stream.world.events_until(300) if e not in repeats]
    for question in further:
        assert question.answer in {fact.answer for fact in find_facts(question.type, seen, 300)}


@pytest.mark.parametrize("seed", range(4))
def test_questions_are_about_the_evidence_wherever_it_lies(seed: int) -> None:
    stream = make_world(seed, length_s=420, distractor_rate=20.0, before="mix", per_type=3)
    world = stream.world
    start_s, *again_s = world.config.showings
    last_s = (again_s or [start_s])[0]
    shown = [e for e in world.events() if start_s <= e.start_s < start_s + 16]
    ends = {e.end_s + last_s - start_s for e in shown} | {last_s + 16.0}
    assert len(stream.questions) > 12
    if start_s == 0:
        # Evidence that comes later is never the first.
        kinds = {kind for kind in TYPES if kind in GROUPS}
        assert {question.type for question in stream.questions} == kinds
    assert {question.reference for question in stream.questions} == {"evidence"}
    assert {question.reference_s for question in stream.questions} <= ends
    repeats = world.repeats()
    for ask_s in (last_s + 16.0, 300.0, 420.0):
        seen = [e for e in world.events_until(ask_s) if e not in repeats]
        for question in stream.questions:
            assert question.answer in {
                fact.answer for fact in find_facts(question.type, seen, ask_s)
            }


@pytest.mark.parametrize("seed", range(6))
def test_questions_of_minutes_have_one_answer_at_every_time_after_their_evidence(seed: int) -> None:
    stream = make_world(
        seed,
        TIME_TYPES,
        length_s=480,
        distractor_rate=20.0,
        per_type=3,
        before="mix",
        evidence="minutes",
    )
    world = stream.world
    assert [question.type for question in stream.questions] == ["times"] * 3 + [
        "where_first",
        "where_last",
    ]
    last_s = max(event.end_s for event in (*world.counted, *world.crossing))
    assert last_s <= 240
    for question in stream.questions:
        assert question.reference_s <= last_s
        for ask_s in (last_s, 300.0, 480.0):
            facts = find_facts(question.type, world.events_until(ask_s), ask_s)
            told = {
                fact.answer
                for fact in facts
                if SHAPES.index(fact.slots["shape"]) in _shapes_in(question.text)
            }
            assert told == {question.answer}
    first, last = stream.questions[-2:]
    assert (first.answer, last.answer) == tuple(
        PLACES[event.place] for event in (world.crossing[0], world.crossing[-1])
    )
    assert (first.reference_s, last.reference_s) == (
        world.crossing[0].end_s,
        world.crossing[-1].end_s,
    )


def _shapes_in(text: str) -> list[int]:
    return [i for i, shape in enumerate(SHAPES) if shape in text.rstrip("?").split()]


def test_every_second_world_spreads_counted_shapes_over_minutes_and_the_others_use_one() -> None:
    placed = [place_minutes(seed, 480)[0] for seed in range(8)]
    assert placed == [(0, 4), (0, 1), (0, 4), (1, 1), (0, 4), (2, 1), (0, 4), (3, 1)]
    crossings = [place_minutes(seed, 480)[1] for seed in range(12)]
    assert len(set(crossings)) > 9
    assert all(
        begins < 180 and 60 <= ends - begins <= 180 and ends <= 240 for begins, ends in crossings
    )


def test_a_mixture_gives_each_of_four_worlds_another_place_unless_the_stream_is_too_short() -> None:
    placed = [place_evidence("mix", seed, 660) for seed in range(8)]
    assert placed[:4] == [(0, None), (120, None), (300, None), (0, 120)] == placed[4:]
    for length_s in (20, 60, 119):
        assert {place_evidence("mix", seed, length_s) for seed in range(8)} == {(0, None)}


def test_a_world_gives_the_steps_that_its_rendered_video_would() -> None:
    stream = make_world(5, length_s=20)
    steps = list(stream.steps(2.0, 2))
    assert [step.time_s for step in steps] == [float(s) for s in range(20)]
    assert np.array_equal(steps[7].images, stream.world.frames(7, 8))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"length_s": 16}, "16 s"),
        ({"evidence": "minutes", "before": 60}, "its own places"),
        ({"evidence": "minutes", "before": "mix", "distractor_similarity": 0.5}, "its own places"),
    ],
)
def test_a_stream_without_room_for_its_evidence_is_refused(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_world(1, **wrong)
