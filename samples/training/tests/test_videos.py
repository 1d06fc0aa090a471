"""The bank of clips, and the videos composed from it: the labels agree with the pictures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from samples.training.bank import Bank
from samples.training.clips import EMPTY, SINGLE
from samples.training.links import find_beginnings, find_earlier_shapes
from samples.training.order_batches import ask, find_mass, make_order_batch, stack
from samples.training.order_curriculum import EASY, FINISH, HARD, HELD_OUT
from samples.training.order_worlds import PLACES as EVIDENCE_PLACES
from samples.training.recurring import draw_again, make_recurring_video
from samples.training.repeated import (
    CLEAR_TWICE,
    PAIRS,
    keep_clear,
    make_repeated_video,
    split_showings,
)
from samples.training.sparse import make_sparse_video
from samples.training.tests.conftest import COUNTS
from samples.training.tests.helpers import BAR, RING, STAR, make_video, tiny
from samples.training.time_curriculum import ANSWER, TALLY
from samples.training.visual_tokens import N_PREFIX
from samples.worlds.pictures import NUMBERS, PLACES, SHAPES
from samples.worlds.questions import find_facts


def test_the_bank_is_consistent_and_comes_back_from_its_tensors(bank):
    assert len(bank.length) == sum(COUNTS.values())
    assert len(bank.features) == len(bank.lit) == bank.length.sum()
    for clip in range(0, len(bank.length), 7):
        events = bank.events[bank.event_of[clip] : bank.event_of[clip + 1]]
        lit = bank.lit[bank.first[clip] : bank.first[clip] + bank.length[clip]]
        assert lit.any() == (bank.kind[clip] != EMPTY)
        for _, _, place, begin, end in events:
            assert lit[begin:end, place].all()
    again = Bank.from_tensors(bank.tensors())
    assert torch.equal(again.features, bank.features)
    np.testing.assert_array_equal(again.events, bank.events)


def test_composed_videos_keep_every_event_and_leave_out_empty_steps_only(composer):
    rng = np.random.default_rng(4)
    stage = tiny(events=(1, 6), many=0.5, repeat=0.3)
    for _ in range(150):
        span, kept = [(4, 4), (9, 9), (64, 24), (640, 31)][int(rng.integers(4))]
        video = composer.compose(rng, stage, span, kept)
        assert len(video.rows) == len(video.times) == kept
        assert (np.diff(video.times) > 0).all()
        assert video.times[0] >= 0
        assert video.times[-1] < span
        assert video.events
        held = set(video.times.tolist())
        for event in video.events:
            assert set(range(int(event.start_s), int(event.end_s))) <= held
            for step in range(int(event.start_s), int(event.end_s)):
                assert video.lit[np.flatnonzero(video.times == step)[0], event.place]


def test_videos_of_many_events_ask_about_things_that_nothing_else_shares(composer):
    rng = np.random.default_rng(5)
    sizes = []
    for _ in range(40):
        video = composer.compose(rng, tiny(many=1.0), 640, 60)
        shapes = [e.shape for e in video.events]
        sizes.append(len(shapes))
        assert len(set(shapes)) < 8
        assert any(shapes.count(s) == 1 for s in shapes)
    assert max(sizes) > 15


@pytest.mark.parametrize("scene", [EASY, HARD], ids=["easy", "hard"])
def test_lit_tokens_are_those_of_events_in_order_of_time_and_cell(composer, scene):
    rng = np.random.default_rng(3)
    for _ in range(60):
        video = make_sparse_video(rng, composer, scene, 0.25)
        key = video.times * 9 + video.cells
        assert (np.diff(key) > 0).all()
        assert scene.span[0] <= video.span
        assert video.times.min() >= 0
        assert video.times.max() == video.span - 1
        assert set(video.cells[video.times == video.span - 1]) == set(range(9))
        of_events = np.zeros(len(key), bool)
        for event in video.events:
            own = (
                (video.cells == event.place)
                & (event.start_s <= video.times)
                & (video.times < event.end_s)
            )
            assert own.any()
            assert (video.times[own] == event.start_s).any()
            of_events |= own
        assert np.array_equal(of_events, video.lit)
        assert np.array_equal(composer.bank.lit[video.rows, video.cells], video.lit)
        assert [e.start_s for e in video.events] == sorted(e.start_s for e in video.events)


def test_evidence_stands_where_the_scene_says(composer):
    rng = np.random.default_rng(4)
    for place in EVIDENCE_PLACES:
        for _ in range(10):
            video = make_sparse_video(rng, composer, replace(HELD_OUT, place=place), 0.25)
            shapes = [event.shape for event in video.events]
            # The shapes of the four are unique; those of the 24 others repeat.
            alone = [i for i, shape in enumerate(shapes) if shapes.count(shape) == 1]
            assert len(alone) >= 4 - (len(shapes) < 28)
            if place == "start":
                assert alone[0] == 0
            if place == "end":
                assert alone[-1] == len(shapes) - 1


def test_padding_and_company_change_no_answer_and_the_mass_is_that_of_all_unlit_tokens(composer):
    rng = np.random.default_rng(5)
    videos = [make_sparse_video(rng, composer, EASY, 0.25) for _ in range(3)]
    shift = np.array([0, 30, 0])
    mass = np.array([find_mass(video) for video in videos])
    for video, m in zip(videos, mass, strict=True):
        unlit = (~video.lit).sum()
        assert np.isclose(np.exp(m) * unlit, 9 * video.span - video.lit.sum())
    tokens, lit = stack(composer, videos, shift, mass)
    for b, video in enumerate(videos):
        n = len(video.times)
        assert tokens.present[b].sum() == n
        assert tokens.present[b, :n].all()
        assert np.array_equal(tokens.times[b, :n], video.times + shift[b])
        assert tokens.end[b] == video.span + shift[b]
        assert np.array_equal(lit[b, :n], video.lit)
        assert not lit[b, n:].any()
        expected = torch.where(
            torch.from_numpy(lit[b, :n]), 0.0, torch.tensor(mass[b], dtype=torch.float32)
        )
        assert torch.equal(tokens.bias[b, :n], expected)
        features = composer.bank.features.view(-1, 9, 128)[video.rows, video.cells]
        assert torch.equal(tokens.features[b, :n], features)


@pytest.mark.parametrize("drop", [0.0, 1.0])
@pytest.mark.parametrize("way", ["full", "window", "far"])
def test_batches_of_all_ways_of_masking_have_labels_that_can_be_known(composer, way, drop):
    stage = replace(
        FINISH, tokens=400, window=float(way == "window"), far=float(way == "far"), drop=drop
    )
    rng = np.random.default_rng(6)
    hidden = 0
    for progress in (0.0, 0.9):
        batch = make_order_batch(rng, composer, stage, progress)
        tokens = batch.tokens
        assert (tokens.window is not None, tokens.far is not None) == (way != "full", way == "far")
        names = set(batch.links)
        assert {"clock", "when", "look"} <= names
        assert {"bag", "bag_asked"} & names == ({"bag", "bag_asked"} if way == "full" else set())
        assert {"later", "other"} & names == (set() if way == "window" else {"later", "other"})
        for videos, positions, bits in batch.links.values():
            assert len(videos) == len(positions) == len(bits) > 0
            assert positions.max() < N_PREFIX + tokens.times.shape[1] + batch.questions[0].numel()
        assert (tokens.seen is not None) == bool(drop)
        if tokens.seen is not None:
            newest = tokens.present & (tokens.times == tokens.end[:, None] - 1)
            assert tokens.seen[newest].all()
            hidden += int((~tokens.seen[tokens.present]).sum())
    assert bool(hidden) == bool(drop)


@pytest.mark.parametrize("scene", [EASY, HARD], ids=["easy", "hard"])
def test_a_second_showing_looks_like_the_first_and_comes_later(composer, scene):
    rng = np.random.default_rng(3)
    repeated = 0
    for _ in range(40):
        video = make_repeated_video(rng, composer, scene, 0.25)
        first = {
            event.shape: event
            for event in video.events
            if event.shape in {r.shape for r in video.repeats}
        }
        assert len(first) == len(video.repeats)
        assert all(last.end_s <= min(e.start_s for e in video.repeats) for last in first.values())
        assert np.array_equal(composer.bank.lit[video.rows, video.cells], video.lit)
        for repeat in video.repeats:
            assert repeat[:3] == first[repeat.shape][:3]
            own = video.lit & (video.cells == repeat.place) & (video.times == int(repeat.start_s))
            assert own.sum() == 1
            assert find_beginnings(video)[own] == int(repeat.start_s)
            # The shape itself was shown before.
            earlier = find_earlier_shapes(video, find_beginnings(video))[own][0]
            assert earlier[repeat.shape]
        repeated += bool(video.repeats)
    assert repeated


def test_a_pair_is_asked_about_only_where_both_showings_agree():
    # A star, then a ring and a bar, then the star again: the star is both before and after the
    # ring.
    video = split_showings(make_video(), {STAR})
    assert [event.shape for event in video.events] == [STAR, RING, BAR]
    assert [event.start_s for event in video.repeats] == [9.0]
    later = replace(
        video, repeats=(*video.repeats, video.events[1]._replace(start_s=10.0, end_s=11.0))
    )
    for kind in PAIRS:
        assert not keep_clear(find_facts(kind, video.events, video.span), video)
        asked = keep_clear(find_facts(kind, later.events, video.span), later)
        assert {frozenset(fact.slots.values()) for fact in asked} == {
            frozenset((SHAPES[STAR], SHAPES[RING]))
        }
    colours = keep_clear(find_facts("colour", video.events, video.span), video)
    assert {fact.slots["shape"] for fact in colours} == {SHAPES[STAR], SHAPES[RING], SHAPES[BAR]}


def test_nothing_is_asked_that_two_showings_answer_in_two_ways(composer):
    rng = np.random.default_rng(5)
    kinds = set()
    for _ in range(30):
        video = make_repeated_video(rng, composer, HARD, 0.25)
        if video.repeats:
            kinds |= {asked.kind for asked in ask(rng, video, 0, ANSWER.weights, 12)}
    assert kinds == CLEAR_TWICE & set(ANSWER.weights)


def _look_of(composer, row, cell):
    """Return the (shape, colour) pairs that a row of the bank shows in a cell."""
    bank = composer.bank
    clip = int(np.searchsorted(bank.first, row, side="right")) - 1
    step = row - bank.first[clip]
    return {
        (s, c)
        for s, c, p, begin, end in composer.events_of(clip).tolist()
        if p == cell and begin <= step < end
    }


@pytest.mark.parametrize("scene", [EASY, HARD], ids=["easy", "hard"])
def test_every_lit_token_shows_the_event_that_it_is_labelled_with(composer, scene):
    rng = np.random.default_rng(3)
    slow = 0
    times = Counter()
    for _ in range(40):
        video = make_recurring_video(rng, composer, scene, 0.25, crossing=0.8)
        assert (np.diff(video.times * 9 + video.cells) > 0).all()
        assert set(video.cells[video.times == video.span - 1]) == set(range(9))
        assert np.array_equal(composer.bank.lit[video.rows, video.cells], video.lit)
        for row, time, cell in zip(
            video.rows[video.lit], video.times[video.lit], video.cells[video.lit], strict=True
        ):
            there = {
                (e.shape, e.colour)
                for e in video.events
                if e.place == cell and int(e.start_s) <= time < e.end_s
            }
            assert there & _look_of(composer, row, cell)
        chain = [event for event in video.events if event.shape in video.slow]
        for one, two in pairwise(chain):
            assert one.end_s == two.start_s
            assert (
                max(abs(one.place // 3 - two.place // 3), abs(one.place % 3 - two.place % 3)) == 1
            )
        assert len({event.colour for event in chain}) <= 1
        slow += bool(chain)
        times.update(fact.answer for fact in find_facts("times", video.events, video.span))
        assert not video.slow & {
            SHAPES.index(f.slots["shape"]) for f in find_facts("times", video.events, video.span)
        }
        if chain:
            facts = {
                kind: find_facts(kind, video.events, video.span)
                for kind in ("where_first", "where_last")
            }
            told = {
                k: {f.answer for f in v if f.slots["shape"] == SHAPES[chain[0].shape]}
                for k, v in facts.items()
            }
            assert told == {
                "where_first": {PLACES[chain[0].place]},
                "where_last": {PLACES[chain[-1].place]},
            }
    # The bank of the tests lacks half of the looks.
    assert slow > 2
    assert set(times) == set(NUMBERS[1:])


def test_a_recurring_event_keeps_its_shape_and_changes_colour_and_place(composer):
    rng = np.random.default_rng(4)
    for _ in range(30):
        clip = int(rng.choice(composer.by_kind[SINGLE]))
        again = draw_again(rng, composer, clip, 3)
        looks = np.array([composer.events_of(c)[0, :3] for c in (clip, *again)])
        assert len(again) == 3
        assert len(set(looks[:, 0])) == 1
        assert len(set(looks[:, 1])) == len(set(looks[:, 2])) == 4


@pytest.mark.parametrize("window", [0.0, 1.0])
def test_questions_over_time_have_links_of_their_own(composer, window):
    weights = {"times": 1.0, "where_first": 1.0, "where_last": 1.0}
    stage = replace(TALLY, tokens=900, window=window, far=0.0, weights=weights)
    batch = make_order_batch(np.random.default_rng(6), composer, stage, 0.5)
    assert set(weights) <= set(batch.types) <= {*weights, "whether"}
    assert {"looks", "until", "times", "closing"} <= set(batch.links)
    # The first event is known only if tokens know what was before them.
    assert ("opening" in batch.links) == ("bag" in batch.links) == (not window)
    assert not {"when", "later"} & set(batch.links)
    asked = sum(kind in weights for kind in batch.types)
    assert len(batch.links["looks"].bits) == len(batch.links["closing"].bits) == asked
    assert (batch.links["closing"].bits.sum(1) == 1).all()
