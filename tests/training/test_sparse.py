"""Sparse videos: what is shown of a video is what the whole video has there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from samples.training.order_batches import find_mass, make_order_batch, stack
from samples.training.order_curriculum import EASY, FINISH, HARD, HELD_OUT, make_curriculum
from samples.training.order_worlds import PLACES
from samples.training.sparse import make_sparse_video
from samples.training.time_curriculum import make_time_curriculum
from samples.training.visual_tokens import N_PREFIX


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
            own = (video.cells == event.place) & (event.start_s <= video.times) & (video.times < event.end_s)
            assert own.any()
            assert (video.times[own] == event.start_s).any()
            of_events |= own
        assert np.array_equal(of_events, video.lit)
        assert np.array_equal(composer.bank.lit[video.rows, video.cells], video.lit)
        assert [e.start_s for e in video.events] == sorted(e.start_s for e in video.events)


def test_evidence_stands_where_the_scene_says(composer):
    rng = np.random.default_rng(4)
    for place in PLACES:
        for _ in range(10):
            video = make_sparse_video(rng, composer, replace(HELD_OUT, place=place), 0.25)
            shapes = [event.shape for event in video.events]
            # Of the four, no shape comes again; of the shapes of the others there are too few for that.
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
        expected = torch.where(torch.from_numpy(lit[b, :n]), 0.0, torch.tensor(mass[b], dtype=torch.float32))
        assert torch.equal(tokens.bias[b, :n], expected)
        features = composer.bank.features.view(-1, 9, 128)[video.rows, video.cells]
        assert torch.equal(tokens.features[b, :n], features)


@pytest.mark.parametrize("drop", [0.0, 1.0])
@pytest.mark.parametrize("way", ["full", "window", "far"])
def test_batches_of_all_ways_of_masking_have_labels_that_can_be_known(composer, way, drop):
    stage = replace(FINISH, tokens=400, window=float(way == "window"), far=float(way == "far"), drop=drop)
    rng = np.random.default_rng(6)
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
            assert not tokens.seen[tokens.present].all()


def test_a_run_has_the_steps_that_it_is_told():
    for steps in (3000, 6000):
        stages = make_curriculum(steps)
        assert sum(stage.steps for stage in stages) == steps
        assert [stage.name for stage in stages] == ["clock", "compare", "order", "finish"]
        assert stages[-1].rate_end < 0.02 * stages[-1].rate


def test_a_run_over_time_has_the_steps_that_it_is_told():
    assert [stage.steps for stage in make_time_curriculum()] == [600, 2400, 2400, 1600, 1500, 240]
    stages = make_time_curriculum(2000)
    assert sum(stage.steps for stage in stages) == 2000
    assert [stage.name for stage in stages] == ["onset", "gather", "tally", "settle", "answer", "polish"]
    assert all(stage.rate_end < 0.03 * stage.rate for stage in stages)
    # What learns alone does not learn with the others, and neither does the clock in front of it.
    alone = {layer for stage in stages for layer in stage.quiet}
    assert alone == {1, 2}
    for stage in stages:
        own = tuple(f"layers.{i}." for i in ((0, *range(3, 8)) if stage.quiet else (0, *alone)))
        assert not [name for name in stage.trains if name.endswith(own)]
