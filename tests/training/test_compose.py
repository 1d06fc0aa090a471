"""Composed videos hold what their truth says."""

from __future__ import annotations

import numpy as np

from tests.training.tiny import tiny


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
