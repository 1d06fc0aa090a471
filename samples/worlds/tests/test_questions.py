"""Questions are unambiguous, their answers follow from the events, and the evidence time is the
last sight of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import ConfigError
from samples.questions import ANSWERS, make_questions
from samples.worlds.events import Event
from samples.worlds.phrases import SPEECH_TYPES, TEMPLATES, TYPES
from samples.worlds.pictures import COLOUR_NAMES, NUMBERS, PARTS, PLACES, SHAPES, TENTHS
from samples.worlds.questions import find_facts
from samples.worlds.speech import NAMES, Caption
from samples.worlds.world import World, WorldConfig

NAMED = {"shape": "|".join(SHAPES), "other": "|".join(SHAPES), "colour": "|".join(COLOUR_NAMES)}
NAMED["name"] = "|".join(NAMES)
NAMED["place"] = "|".join(sorted(PLACES, key=len, reverse=True))

OWNED = re.compile(f"({NAMED['shape']}) is ({NAMED['name']})")


def _read(kind: str, text: str) -> tuple[int, dict[str, str]]:
    """Read a question back from its English alone: return the number of its phrasing and the words
    filled in.
    """
    for number, template in enumerate(TEMPLATES[kind]):
        pattern = re.escape(template)
        for name, choice in NAMED.items():
            pattern = pattern.replace(re.escape("{" + name + "}"), f"(?P<{name}>{choice})")
        if found := re.fullmatch(pattern, text):
            return number, found.groupdict()
    raise AssertionError(f"no template of {kind} made {text!r}")


def _rederived(
    kind: str, slots: dict[str, str], events: Sequence[Event], ask_s: float, said: Sequence[Caption]
) -> tuple[set[str], float]:
    """Return every answer that events and captions allow, by brute force over frames, and when its
    evidence ended.
    """
    times = np.arange(0, ask_s, 0.5)
    shown = [[e for e in events if e.start_s <= t < e.end_s] for t in times]

    def last_sight(wanted: Collection[Event]) -> float:
        return max(
            (
                t + 0.5
                for t, there in zip(times, shown, strict=True)
                if any(e in wanted for e in there)
            ),
            default=-1,
        )

    def appeared(shape: str) -> list[Event]:
        return [e for e in events if SHAPES[e.shape] == shape]

    if kind in SPEECH_TYPES:
        told = [
            (find.group(1), find.group(2), c.second + 1)
            for c in said
            if (find := OWNED.search(c.text))
        ]
        own = [one for one in told if slots.get("shape") == one[0] or slots.get("name") == one[1]]
        told_s = min(at for *_, at in own)
        wanted = [e for e in events if SHAPES[e.shape] in {one[0] for one in own}]
        if kind in ("owner", "owned"):
            return {one[1] if kind == "owner" else one[0] for one in own}, told_s
        answers = {
            COLOUR_NAMES[e.colour] if kind == "colour_of" else PLACES[e.place] for e in wanted
        }
        return answers, max(told_s, last_sight(wanted))
    if kind in ("colour", "where"):
        wanted = appeared(slots["shape"])
        return {
            COLOUR_NAMES[e.colour] if kind == "colour" else PLACES[e.place] for e in wanted
        }, last_sight(wanted)
    if kind == "shape":
        wanted = [e for e in events if COLOUR_NAMES[e.colour] == slots["colour"]]
        return {SHAPES[e.shape] for e in wanted}, last_sight(wanted)
    if kind == "at":
        wanted = [e for e in events if PLACES[e.place] == slots["place"]]
        return {SHAPES[e.shape] for e in wanted}, last_sight(wanted)
    if kind == "whether":
        wanted = appeared(slots["shape"])
        return ({"yes"}, last_sight(wanted)) if wanted else ({"no"}, ask_s)
    by_start = sorted(events, key=lambda e: e.start_s)
    last_s = by_start[-1].start_s if by_start else 0
    if kind in ("first", "last"):
        decisive = by_start[0 if kind == "first" else -1]
        rivals = [e for e in events if int(e.start_s) == int(decisive.start_s)]
        return {SHAPES[e.shape] for e in rivals}, last_sight([decisive])
    if "other" in slots:
        (one,), (two,) = appeared(slots["shape"]), appeared(slots["other"])
        assert int(one.start_s) != int(two.start_s)
        if kind.startswith("middle"):
            assert not {one, two} & {
                e for e in events if int(e.start_s) in (int(by_start[0].start_s), int(last_s))
            }
        if kind.endswith(("first", "last")):
            answer = (min if kind.endswith("first") else max)(one, two, key=lambda e: e.start_s)
            return {SHAPES[answer.shape]}, last_sight([one, two])
        is_true = (one.start_s < two.start_s) == kind.endswith("before")
        return {"yes" if is_true else "no"}, last_sight([one, two])
    if kind in ("third", "tenth"):
        names = PARTS if kind == "third" else TENTHS
        (only,) = appeared(slots["shape"])
        inside = [t for t, there in zip(times, shown, strict=True) if only in there]
        return {names[int(len(names) * t / ask_s)] for t in inside}, last_sight([only])
    if kind == "times":
        wanted = appeared(slots["shape"])
        frames = [any(e in wanted for e in there) for there in shown]
        return {
            NUMBERS[sum(now and not before for before, now in pairwise([False, *frames]))]
        }, last_sight(wanted)
    if kind in ("where_first", "where_last"):
        wanted = appeared(slots["shape"])
        assert len({e.place for e in wanted}) > 1
        seconds = [int(e.start_s) for e in wanted]
        second = (min if kind == "where_first" else max)(seconds)
        rivals = [e for e, one in zip(wanted, seconds, strict=True) if one == second]
        return {PLACES[e.place] for e in rivals}, last_sight(rivals)
    if kind == "count":
        return {("one", "two", "three", "four")[len(events) - 1]}, last_sight(events)
    now = [SHAPES[e.shape] for e in shown[-1]]
    if kind == "now":
        return set(now) or {"nothing"}, ask_s
    return {"yes" if now else "no"}, ask_s


@given(
    seed=st.integers(0, 2**31 - 1),
    rate=st.sampled_from([2.0, 6.0, 20.0, 40.0]),
    evidence=st.integers(0, 4),
    ask_s=st.integers(1, 130),
    asked_with=st.integers(0, 99),
)
def test_every_question_has_one_answer_and_evidence_ends_when_it_was_last_visible(
    seed: int, rate: float, evidence: int, ask_s: int, asked_with: int
) -> None:
    world = World(
        WorldConfig(
            seed,
            130,
            rate,
            overlap=0.5,
            evidence_events=evidence,
            evidence_s=29,
            speech_per_minute=rate,
        )
    )
    events = world.events_until(ask_s)
    said = world.said(0, ask_s)
    for made in make_questions(world, ask_s, per_type=3, types=tuple(TEMPLATES), seed=asked_with):
        answers, last_seen = _rederived(
            made.type, _read(made.type, made.question)[1], events, ask_s, said
        )
        assert answers == {made.answer}
        assert made.evidence_s == last_seen
        assert made.evidence_s <= made.ask_s == ask_s
        assert made.answer in ANSWERS[made.type]


@given(seed=st.integers(0, 2**31 - 1), rate=st.floats(0, 30), later=st.integers(31, 600))
def test_questions_about_first_evidence_keep_their_answers_at_any_later_time(
    seed: int, rate: float, later: int
) -> None:
    world = World(WorldConfig(seed, 600, rate, evidence_events=4, evidence_s=30))
    before = world.events_until(30)
    after = world.events_until(later)
    for kind in ("colour", "shape", "where", "at", "which_first", "which_last"):
        then = {
            (tuple(f.slots.items()), f.answer, f.evidence_s) for f in find_facts(kind, after, later)
        }
        assert {
            (tuple(f.slots.items()), f.answer, f.evidence_s) for f in find_facts(kind, before, 30)
        } <= then


def test_every_type_can_be_asked_and_in_every_phrasing() -> None:
    templates = TEMPLATES
    seen: dict[str, set[int]] = {kind: set() for kind in templates}
    for seed in range(150):
        world = World(WorldConfig(seed, 20, 12.0, speech_per_minute=20.0))
        for made in make_questions(world, 20, types=tuple(templates)):
            seen[made.type].add(_read(made.type, made.question)[0])
    assert all(len(seen[kind]) == len(templates[kind]) for kind in templates)


def test_questions_about_order_and_over_time_are_asked_only_where_they_are_named() -> None:
    asked = {
        made.type for seed in range(20) for made in make_questions(World(WorldConfig(seed, 60)), 60)
    }
    assert asked <= set(TYPES)


def test_an_event_at_the_border_of_two_parts_is_not_asked_about() -> None:
    event = next(iter(World(WorldConfig(3, 60, 20.0)).events()))
    moved = [
        replace(event, start_s=start, end_s=start + 2.0) for start in (8.0, 17.0, 19.0, 21.0, 30.0)
    ]
    facts = [find_facts("third", [event], 60) for event in moved]
    assert [fact[0].answer if fact else None for fact in facts] == [
        "start",
        None,
        None,
        None,
        "middle",
    ]
    assert find_facts("tenth", [replace(event, start_s=57.0, end_s=60.0)], 60)[0].answer == "ten"


def test_a_shape_is_counted_where_its_events_are_apart_and_a_chain_of_them_was_at_two_places() -> (
    None
):
    event = replace(next(iter(World(WorldConfig(3, 60, 20.0)).events())), place=0)
    other = replace(event, shape=(event.shape + 1) % len(SHAPES), place=5)

    def ask(kind: str, *starts: float) -> list[tuple[str, tuple[int, ...], float]]:
        own = [
            replace(event, start_s=start, end_s=start + 2.0, place=i)
            for i, start in enumerate(starts)
        ]
        return [(f.answer, f.evidence, f.evidence_s) for f in find_facts(kind, [*own, other], 60)][
            :1
        ]

    assert ask("times", 3.0, 7.0, 20.0) == [("three", (0, 1, 2), 22.0)]
    assert [f.answer for f in find_facts("times", [event, other], 60)] == ["one", "one"]
    for too_close_or_too_many in ((3.0, 6.5), (3.0, 5.0), (3.0, 10.0, 20.0, 30.0, 40.0)):
        assert ask("times", *too_close_or_too_many) in (
            [],
            [("one", (len(too_close_or_too_many),), other.end_s)],
        )
    chain = (3.0, 5.0, 7.0)
    assert ask("where_first", *chain) == [("top left", (0,), 5.0)]
    assert ask("where_last", *chain) == [("top right", (2,), 9.0)]
    assert (
        not ask("where_first", 3.0)
        + ask("where_first", 3.0, 3.0)
        + ask("where_last", 1.0, 3.0, 3.5)
    )


def test_the_same_arguments_ask_the_same_and_another_seed_asks_otherwise() -> None:
    world = World(WorldConfig(12, 60))
    assert make_questions(world, 43, per_type=2) == make_questions(world, 43, per_type=2)
    assert make_questions(world, 43, per_type=2) != make_questions(world, 43, per_type=2, seed=1)


def test_yes_and_no_are_asked_equally_often() -> None:
    answers = [
        q.answer
        for seed in range(200)
        for q in make_questions(World(WorldConfig(seed, 30)), 30, types=("whether",))
    ]
    assert 70 < answers.count("yes") < 130


def test_a_shape_that_appears_twice_is_not_counted() -> None:
    one, *others = list(World(WorldConfig(3, 60, 20.0)).events())
    other = next(e for e in others if e.shape != one.shape)
    assert find_facts("count", [one, other], 60)[0].answer == "two"
    assert find_facts("count", [one, one], 60) == []


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'smell'"):
        find_facts("smell", [], 5)
