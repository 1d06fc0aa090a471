"""Evidence that lasts for minutes: a crossing shape is where its events say, and counts match the
frames.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from samples.worlds.events import CELL, LINES, LONGEST_S, MOST_TIMES, Event, cross, find_touched
from samples.worlds.pictures import NUMBERS, PLACES, SHAPES, SIZES
from samples.worlds.questions import find_facts
from samples.worlds.world import World, WorldConfig

SEEDS = st.integers(0, 2**31 - 1)
LASTING = st.builds(
    lambda seed, counted, first, minutes, begins, takes: WorldConfig(
        seed,
        480,
        20.0,
        counted=counted,
        counted_in=(first, minutes),
        crossing_s=(begins, begins + takes),
    ),
    SEEDS,
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 200),
    st.integers(60, 180),
)
PLACE = st.integers(0, len(PLACES) - 1)


def _middle(place: int) -> np.ndarray:
    return CELL * (np.array(divmod(place, 3))[::-1] + 0.5)


@given(
    first=PLACE,
    last=PLACE,
    begins=st.integers(0, 400),
    takes=st.integers(12, 200),
    share=st.floats(0, 1),
)
def test_a_crossing_is_on_the_straight_line_at_every_time_and_in_the_cell_it_names(
    first: int, last: int, begins: int, takes: int, share: float
) -> None:
    chain = cross(Event(0, 0, first, begins, begins + takes, 20, (0.0, 0.0, 0.0)), last)
    assert (chain[0].place, chain[-1].place) == (first, last)
    assert (chain[0].start_s, chain[-1].end_s) == (begins, begins + takes)
    assert all(one.end_s == later.start_s for one, later in pairwise(chain))
    assert len({event.place for event in chain}) == len(chain)
    time_s = min(begins + share * takes, np.nextafter(begins + takes, 0))
    (shown,) = (event for event in chain if event.start_s <= time_s < event.end_s)
    expected = _middle(first) + (time_s - begins) / takes * (_middle(last) - _middle(first))
    np.testing.assert_allclose(shown.centre(time_s), expected, atol=1e-6)
    assert np.abs(expected - _middle(shown.place)).max() <= CELL / 2 + 1e-6


@given(config=LASTING, offset=st.sampled_from([0.0, 0.5]))
def test_a_shape_is_counted_as_often_as_it_comes_into_view(
    config: WorldConfig, offset: float
) -> None:
    world = World(config)
    counted = {event.shape for event in world.counted}
    assert len(counted) == config.counted
    before: set[tuple[int, int, int]] = set()
    seen = dict.fromkeys(counted, 0)
    for second in range(config.length_s):
        now = {
            (e.shape, e.colour, e.place)
            for e in world.visible(second + offset)
            if e.shape in counted
        }
        for shape, *_ in now - before:
            seen[shape] += 1
        before = now
    facts = find_facts("times", list(world.events()), config.length_s)
    told = {fact.slots["shape"]: fact.answer for fact in facts}
    assert {SHAPES[shape]: NUMBERS[n] for shape, n in seen.items()}.items() <= told.items()
    first, minutes = config.counted_in
    for shape in counted:
        own = [event for event in world.counted if event.shape == shape]
        assert (
            len({event.colour for event in own}) == len({event.place for event in own}) == len(own)
        )
        assert all(later.start_s - one.end_s >= 2 for one, later in pairwise(own))
        within = [int(event.start_s // 60) for event in own]
        assert set(within) <= set(range(first, first + minutes))
        assert len(set(within)) == min(len(own), minutes)


@given(group=st.integers(0, 1000), begins=st.integers(0, 200))
@settings(max_examples=5)
def test_consecutive_seeds_share_out_lines_and_counts_equally(group: int, begins: int) -> None:
    worlds = [
        World(
            WorldConfig(
                seed, 480, 0.0, counted=3, counted_in=(0, 4), crossing_s=(begins, begins + 60)
            )
        )
        for seed in range(32 * group, 32 * (group + 1))
    ]
    lines = {(world.crossing[0].place, world.crossing[-1].place) for world in worlds}
    assert len(lines) == len(worlds) == len(LINES)
    counts = Counter(
        n for world in worlds for n in Counter(event.shape for event in world.counted).values()
    )
    assert counts == dict.fromkeys(range(1, MOST_TIMES + 1), 24)


@given(config=LASTING)
def test_distractors_have_none_of_the_shapes_and_keep_out_of_the_way(config: WorldConfig) -> None:
    world = World(config)
    own = {event.shape for event in (*world.counted, *world.crossing)}
    lasting = (*world.counted, *world.crossing)
    others = [event for event in world.events() if event not in lasting]
    assert len(others) > 60
    assert not own & {event.shape for event in others}
    assert len({event.shape for event in world.events()}) < len(SHAPES)
    assert world.crossing[0].colour not in {event.colour for event in (*others, *world.counted)}
    for event in (*others, *world.counted):
        assert event.end_s - event.start_s <= LONGEST_S
        assert event.place not in find_touched(world.crossing, event.start_s, event.end_s)
    for second in range(config.length_s):
        shown = world.visible(second)
        assert len(shown) <= 3
        for attribute in ("shape", "colour", "place"):
            assert len({getattr(event, attribute) for event in shown}) == len(shown)
    starts = [event.start_s for event in world.events()]
    assert starts == sorted(starts)


@settings(max_examples=10, deadline=None)
@given(config=LASTING, share=st.floats(0, 1, exclude_max=True))
def test_a_crossing_is_of_the_size_of_events_and_nothing_is_painted_over_it(
    config: WorldConfig, share: float
) -> None:
    world = World(config)
    assert config.crossing_s
    begins, ends = config.crossing_s
    time_s = int(2 * (begins + share * (ends - begins))) / 2
    event = world.visible(time_s)[-1]
    assert event in world.crossing
    assert event.size in SIZES
    x, y = (int(v) for v in event.centre(time_s))
    box = world.frame(time_s)[max(0, y - 12) : y + 13, max(0, x - 12) : x + 13].astype(float)
    assert int((np.abs(box - event.tint).max(-1) < 2).sum()) >= 60
