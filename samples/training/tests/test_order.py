"""Held-out worlds, the questions about them, and the batches of every stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini.backbone import MiniBackbone
from samples.seeds import CARD, ORDER_CARD, TIME_CARD
from samples.training import evaluate_order as evaluate_order_module
from samples.training.batches import IGNORED, judge_answers, make_batch
from samples.training.curriculum import CURRICULUM
from samples.training.evaluate import LENGTHS, evaluate, format_table, make_held_out_world
from samples.training.evaluate_order import (
    answer_all,
    bootstrap,
    evaluate_order,
    find_known_types,
    format_order_table,
)
from samples.training.model import make_model
from samples.training.order_worlds import (
    ASKED,
    ASKED_TWICE,
    DISTRACTORS,
    PLACES,
    TWICE,
    ask_order,
    make_order_world,
)
from samples.training.tests.helpers import SMALL
from samples.training.time_worlds import ask_time, make_time_world
from samples.worlds.phrases import ORDER_TYPES, TIME_TYPES, TYPES
from samples.worlds.pictures import NUMBERS
from samples.worlds.pictures import PLACES as MINI_PLACES
from samples.worlds.questions import find_facts


def test_questions_over_minutes_are_about_recurring_and_crossing_shapes():
    numbers = set()
    spread = set()
    for index in range(6):
        for place in PLACES:
            world = make_time_world(place, index)
            assert world.config.seed in TIME_CARD
            assert (
                abs(
                    len(list(world.events()))
                    - len(world.counted)
                    - len(world.crossing)
                    - DISTRACTORS
                )
                <= 4
            )
            asked = ask_time(world)
            assert asked == ask_time(world)
            by_kind = {kind: [q for q in asked if q.type == kind] for kind in TIME_TYPES}
            assert [len(found) for found in by_kind.values()] == [3, 1, 1]
            assert by_kind["where_first"][0].answer == MINI_PLACES[world.crossing[0].place]
            assert by_kind["where_last"][0].answer == MINI_PLACES[world.crossing[-1].place]
            assert by_kind["where_last"][0].evidence_s == world.crossing[-1].end_s
            numbers |= {question.answer for question in by_kind["times"]}
            spread.add(len({int(event.start_s) // 60 for event in world.counted}) > 1)
    assert numbers == set(NUMBERS[1:])
    assert spread == {False, True}


def test_worlds_of_order_are_of_the_card_and_of_no_other_table_of_it():
    assert set(ORDER_CARD) | set(TIME_CARD) < set(CARD)
    assert not set(ORDER_CARD) & set(TIME_CARD)
    others = {CARD.start + 10_000 * length + index for length in LENGTHS for index in range(4 * 96)}
    assert not others & {*ORDER_CARD, *TIME_CARD}
    assert make_order_world("end", 63).config.seed in ORDER_CARD


def test_pairs_are_of_events_between_the_first_and_the_last_and_every_type_is_asked():
    kinds = set()
    for index in range(6):
        for place in PLACES:
            world = make_order_world(place, index)
            asked = ask_order(world)
            assert asked == ask_order(world)
            assert len({(q.type, q.question) for q in asked}) > 0.8 * len(asked)
            kinds |= {q.type for q in asked}
    assert kinds == set(ASKED)
    assert {kind for kind in ORDER_TYPES if kind.startswith("middle")} < kinds


def test_the_shipped_models_are_asked_what_they_have_words_for():
    assert set(find_known_types(MiniBackbone.folder("protokv/mini"))) == set(ASKED) - {
        "third",
        "tenth",
        "middle_before",
        "middle_after",
    }
    assert set(find_known_types(MiniBackbone.folder("protokv/mini-order"))) == {*ASKED, *TIME_TYPES}


def test_the_larger_model_reads_order_and_what_the_smaller_one_reads():
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        MiniBackbone.folder("protokv/mini-order"), dtype=torch.float32
    )
    world = make_held_out_world("crowd", 64, 1)
    asked = ask_order(world, ("middle_first", "middle_before", "third", "colour", "at"), 3)
    right = answer_all(model.eval(), world, asked)
    assert len(asked) > 10
    assert sum(right) >= 0.9 * len(asked)


@pytest.mark.slow
def test_the_larger_model_reads_what_happens_over_time():
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        MiniBackbone.folder("protokv/mini-order"), dtype=torch.float32
    )
    found = {kind: [] for kind in TIME_TYPES}
    for index in range(6):
        world = make_time_world(PLACES[index % 3], index)
        asked = ask_time(world)
        for question, right in zip(asked, answer_all(model.eval(), world, asked), strict=True):
            found[question.type].append(right)
    assert [len(right) for right in found.values()] == [18, 6, 6]
    assert sum(found["times"]) >= 12
    assert sum(found["where_first"]) + sum(found["where_last"]) >= 10


def test_blocks_of_questions_are_read_as_one_by_one(monkeypatch):
    model = make_model(1, **SMALL).eval()
    world = make_held_out_world("crowd", 32, 0)
    asked = ask_order(world, ("colour", "where", "middle_first"), 3)
    assert len(asked) > 4
    verdicts = []
    for block in (1, 4):
        monkeypatch.setattr(evaluate_order_module, "BLOCK", block)
        verdicts.append(answer_all(model, world, asked))
    assert verdicts[0] == verdicts[1]


def test_an_interval_is_that_of_drawing_worlds():
    # Each world is all right or all wrong: the interval is that of 64 worlds, not of 640 questions.
    counts = np.array([[10, 10]] * 48 + [[0, 10]] * 16)
    half = 1.96 * (0.75 * 0.25 / 64) ** 0.5
    assert bootstrap(counts) == pytest.approx((0.75 - half, 0.75 + half), abs=0.02)
    assert bootstrap(np.array([[3, 3], [5, 5]])) == (1.0, 1.0)


def test_the_table_has_a_row_for_each_type_and_counts_the_questions(monkeypatch):
    monkeypatch.setattr(
        evaluate_order_module, "answer_all", lambda model, world, asked: [True] * len(asked)
    )
    lines = list(format_order_table(evaluate_order(None, ("middle_first", "colour"), worlds=1)))
    assert len(lines) == 2 + 2
    assert len({line.count("|") for line in lines}) == 1
    assert lines[3].endswith("| 12 |")


def test_answers_about_evidence_shown_twice_are_true_of_both_showings():
    kinds = set()
    for index in range(4):
        world = make_order_world(TWICE, index)
        showings = world.events_until(world.config.length_s)[:4], world.repeats()
        told = [
            {
                (kind, fact.answer, *sorted(fact.slots.values()))
                for kind in ASKED_TWICE
                for fact in find_facts(kind, events, world.config.length_s)
            }
            for events in showings
        ]
        assert told[0] == told[1]
        asked = ask_order(world, ASKED_TWICE)
        assert {(question.type, question.answer) for question in asked} <= {
            fact[:2] for fact in told[0]
        }
        kinds |= {question.type for question in asked}
    assert kinds == set(ASKED_TWICE)


def test_evaluation_scores_an_untrained_model_near_chance_and_prints_a_table():
    model = make_model(1, **SMALL).eval()
    cells = list(evaluate(model, lengths=[9], loads=["few"], ways=["full", "recent"], n=12))
    assert {cell.way for cell in cells} == {"full", "recent"}
    assert all(cells[0].asked[t] >= 10 for t in TYPES)
    assert np.mean(list(cells[0].accuracy.values())) < 0.4
    lines = list(format_table(cells))
    assert len(lines) == 2 + 1 + 2
    assert len({line.count("|") for line in lines}) == 1


def test_held_out_worlds_have_the_load_they_are_named_after():
    assert all(1 <= len(make_held_out_world("few", 37, i).events_until(37)) <= 4 for i in range(20))
    assert all(len(make_held_out_world("many", 90, i).events_until(90)) >= 5 for i in range(20))


@pytest.mark.parametrize("stage", CURRICULUM, ids=lambda s: s.name)
def test_every_stage_of_the_curriculum_makes_batches(composer, stage):
    rng = np.random.default_rng(6)
    kinds = set()
    for i in range(6):
        batch = make_batch(rng, composer, replace(stage, tokens=400), i / 6)
        kinds |= set(batch.types)
        assert ((batch.labels != IGNORED).sum(-1) >= 2).all()
        assert (batch.tokens.times[:, -1] < batch.tokens.end).all()
        if batch.tokens.seen is not None:
            assert batch.tokens.seen.any(-1).all()
            assert not batch.tokens.seen.all()
    assert kinds <= set(stage.weights) | {"whether"}


def test_an_answer_is_right_when_its_words_are_whatever_its_end_is():
    labels = torch.tensor([[[IGNORED, 40, 41, 2]], [[IGNORED, 40, 2, IGNORED]]])
    logits = torch.zeros(5, 128)
    logits[[0, 1, 3], [40, 41, 39]] = 1.0
    assert judge_answers(logits, labels) == [True, False]
