"""Shapes that come again and one that crosses the picture: what is labelled is what is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from protokv.mini.questions import find_facts
from protokv.mini.sprites import NUMBERS, PLACES, SHAPES
from protokv.mini.vocabulary import words
from samples.training.clips import SINGLE
from samples.training.order_batches import make_order_batch
from samples.training.order_curriculum import EASY, HARD
from samples.training.recurring import draw_again, draw_way, make_recurring_video
from samples.training.time_curriculum import TALLY


def _look_of(composer, row, cell):
    """Shape and colour of what a row of the bank shows in a cell."""
    bank = composer.bank
    clip = int(np.searchsorted(bank.first, row, side="right")) - 1
    step = row - bank.first[clip]
    return {(s, c) for s, c, p, begin, end in composer.events_of(clip).tolist() if p == cell and begin <= step < end}


@pytest.mark.parametrize("scene", [EASY, HARD], ids=["easy", "hard"])
def test_every_lit_token_shows_the_event_that_it_is_labelled_with(composer, scene):
    rng = np.random.default_rng(3)
    slow, times = 0, Counter()
    for _ in range(40):
        video = make_recurring_video(rng, composer, scene, 0.25, crossing=0.8)
        assert (np.diff(video.times * 9 + video.cells) > 0).all()
        assert set(video.cells[video.times == video.span - 1]) == set(range(9))
        assert np.array_equal(composer.bank.lit[video.rows, video.cells], video.lit)
        for row, time, cell in zip(video.rows[video.lit], video.times[video.lit], video.cells[video.lit], strict=True):
            there = {(e.shape, e.colour) for e in video.events if e.place == cell and int(e.start_s) <= time < e.end_s}
            assert there & _look_of(composer, row, cell)
        chain = [event for event in video.events if event.shape in video.slow]
        assert all(one.end_s == two.start_s and one.place != two.place for one, two in pairwise(chain))
        assert len({event.colour for event in chain}) <= 1
        slow += bool(chain)
        times.update(fact.answer for fact in find_facts("times", video.events, video.span))
        assert not video.slow & {SHAPES.index(f.slots["shape"]) for f in find_facts("times", video.events, video.span)}
        if chain:
            facts = {kind: find_facts(kind, video.events, video.span) for kind in ("where_first", "where_last")}
            told = {k: {f.answer for f in v if f.slots["shape"] == SHAPES[chain[0].shape]} for k, v in facts.items()}
            assert told == {"where_first": {PLACES[chain[0].place]}, "where_last": {PLACES[chain[-1].place]}}
    # The bank of the tests lacks half of the looks.
    assert slow > 2
    assert set(times) == set(NUMBERS[1:])


def test_what_comes_again_has_the_shape_and_differs_in_colour_and_place(composer):
    rng = np.random.default_rng(4)
    for _ in range(30):
        clip = int(rng.choice(composer.by_kind[SINGLE]))
        again = draw_again(rng, composer, clip, 3)
        looks = np.array([composer.events_of(c)[0, :3] for c in (clip, *again)])
        assert len(again) == 3
        assert len(set(looks[:, 0])) == 1
        assert len(set(looks[:, 1])) == len(set(looks[:, 2])) == 4


def test_a_way_leads_from_cell_to_cell_beside_it():
    rng = np.random.default_rng(5)
    lengths = Counter()
    for _ in range(200):
        way = draw_way(rng)
        lengths[len(way)] += 1
        assert len(set(way)) == len(way)
        for one, two in pairwise(way):
            assert max(abs(one // 3 - two // 3), abs(one % 3 - two % 3)) == 1
    assert set(lengths) == {2, 3, 4, 5}


@pytest.mark.parametrize("window", [0.0, 1.0])
def test_questions_over_time_have_links_of_their_own(composer, window):
    weights = {"times": 1.0, "where_first": 1.0, "where_last": 1.0}
    stage = replace(TALLY, tokens=900, window=window, far=0.0, weights=weights)
    batch = make_order_batch(np.random.default_rng(6), composer, stage, 0.5)
    assert set(weights) <= set(batch.types) <= {*weights, "whether"}
    assert {"looks", "until", "times", "closing"} <= set(batch.links)
    # Which one was the first is told by what tokens know about what was before them.
    assert ("opening" in batch.links) == ("bag" in batch.links) == (not window)
    assert not {"when", "later"} & set(batch.links)
    asked = sum(kind in weights for kind in batch.types)
    assert len(batch.links["looks"].bits) == len(batch.links["closing"].bits) == asked
    assert (batch.links["closing"].bits.sum(1) == 1).all()
    numbers = [n for n, kind in zip(_answers(batch), batch.types, strict=True) if kind == "times"]
    assert set(numbers) == set(NUMBERS[1:])


def _answers(batch):
    names = words("time")
    first = (batch.labels >= 0).int().argmax(-1)
    return [names[i] for i in batch.labels.gather(-1, first[..., None]).flatten().tolist()]
