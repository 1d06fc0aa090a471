"""Videos in which what is asked about is shown twice: what is labelled is what is shown, and answers fit both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from protokv.mini.questions import find_facts
from protokv.mini.sprites import SHAPES
from samples.training.links import find_beginnings, find_earlier_shapes
from samples.training.order_batches import ask, draw_videos
from samples.training.order_curriculum import EASY, HARD
from samples.training.recurring import make_recurring_video
from samples.training.repeated import CLEAR_TWICE, PAIRS, keep_clear, make_repeated_video, split_showings
from samples.training.sparse import make_sparse_video
from samples.training.time_curriculum import ANSWER, TALLY
from tests.training.by_hand import BAR, RING, STAR, make_video


@pytest.mark.parametrize("scene", [EASY, HARD], ids=["easy", "hard"])
def test_a_second_showing_looks_like_the_first_and_comes_later(composer, scene):
    rng = np.random.default_rng(3)
    sizes = set()
    for _ in range(40):
        video = make_repeated_video(rng, composer, scene, 0.25)
        first = {event.shape: event for event in video.events if event.shape in {r.shape for r in video.repeats}}
        assert len(first) == len(video.repeats)
        for repeat in video.repeats:
            event = first[repeat.shape]
            assert repeat[:3] == event[:3]
            assert event.start_s < repeat.start_s
        assert all(last.end_s <= min(e.start_s for e in video.repeats) for last in first.values())
        assert np.array_equal(composer.bank.lit[video.rows, video.cells], video.lit)
        for repeat in video.repeats:
            own = video.lit & (video.cells == repeat.place) & (video.times == int(repeat.start_s))
            assert own.sum() == 1
            assert find_beginnings(video)[own] == int(repeat.start_s)
            # The shape itself was there before, and so was all that came before it in the first showing.
            earlier = find_earlier_shapes(video, find_beginnings(video))[own][0]
            assert earlier[repeat.shape]
        sizes.add((bool(video.repeats), len(video.repeats) == len(first)))
    assert (True, True) in sizes


def test_a_video_without_others_is_a_plain_one(composer):
    video = make_repeated_video(np.random.default_rng(4), composer, replace(EASY, others=(0, 1)), 0.25)
    assert not video.repeats
    assert keep_clear(find_facts("before", video.events, video.span), video) == find_facts(
        "before", video.events, video.span
    )


def test_a_pair_is_asked_about_only_where_both_showings_agree():
    # A star, then a ring and a bar, then the star again: the star is before the ring, and behind it too.
    video = split_showings(make_video(), {STAR})
    assert [event.shape for event in video.events] == [STAR, RING, BAR]
    assert [event.start_s for event in video.repeats] == [9.0]
    later = replace(video, repeats=(*video.repeats, video.events[1]._replace(start_s=10.0, end_s=11.0)))
    for kind in PAIRS:
        assert not keep_clear(find_facts(kind, video.events, video.span), video)
        asked = keep_clear(find_facts(kind, later.events, video.span), later)
        assert {frozenset(fact.slots.values()) for fact in asked} == {frozenset((SHAPES[STAR], SHAPES[RING]))}
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


def test_the_share_of_repeated_videos_is_what_the_stage_says(composer, monkeypatch):
    counts = {"again": 0, "twice": 0, "plain": 0}

    def count(name, make):
        def made(*arguments):
            counts[name] += 1
            return make(*arguments)

        return made

    module = "samples.training.order_batches."
    monkeypatch.setattr(module + "make_recurring_video", count("again", make_recurring_video))
    monkeypatch.setattr(module + "make_repeated_video", count("twice", make_repeated_video))
    monkeypatch.setattr(module + "make_sparse_video", count("plain", make_sparse_video))
    rng = np.random.default_rng(6)
    for _ in range(40):
        draw_videos(rng, composer, TALLY, EASY)
    n = sum(counts.values())
    assert n > 500
    for name, share in (("again", TALLY.recurring), ("twice", TALLY.repeated)):
        assert abs(counts[name] / n - share) < 3 * (share * (1 - share) / n) ** 0.5
