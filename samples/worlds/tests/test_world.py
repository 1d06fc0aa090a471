"""The procedural world is deterministic and lazy, and its frames show its events."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from protokv.errors import ConfigError
from samples.worlds.events import Event
from samples.worlds.pictures import COLOUR_NAMES, COLOURS, draw_noise
from samples.worlds.world import World, WorldConfig

SEEDS = st.integers(0, 2**31 - 1)


@given(
    seed=SEEDS,
    short=st.integers(1, 130),
    more=st.integers(1, 500),
    time=st.floats(0, 1, exclude_max=True),
    lasting=st.sampled_from([{}, {"counted": 3, "counted_in": (0, 2), "crossing_s": (20, 120)}]),
)
def test_frames_and_events_do_not_depend_on_the_length_of_the_stream(
    seed: int, short: int, more: int, time: float, lasting: dict[str, Any]
) -> None:
    one = World(WorldConfig(seed, short, **lasting))
    two = World(WorldConfig(seed, short + more, **lasting))
    at = time * short
    assert one.events_until(at) == two.events_until(at)
    assert one.scene(at).scenery == two.scene(at).scenery
    np.testing.assert_array_equal(one.frame(at), two.frame(at))


def test_a_frame_far_into_the_stream_needs_nothing_before_it() -> None:
    config = WorldConfig(seed=11, length_s=10**6)
    first = World(config).frame(999_983.5)
    walked = World(config)
    walked.frames(0, 5)
    np.testing.assert_array_equal(first, walked.frame(999_983.5))


@given(
    seed=SEEDS,
    rate=st.floats(1, 40),
    moving=st.sampled_from([0.0, 0.5, 1.0]),
    overlap=st.sampled_from([0.0, 0.5, 1.0]),
    evidence=st.integers(0, 4),
)
def test_events_last_1_to_4_s_at_most_two_at_once_and_those_differ(
    seed: int, rate: float, moving: float, overlap: float, evidence: int
) -> None:
    config = WorldConfig(seed, 130, rate, moving, overlap, evidence_events=evidence, evidence_s=33)
    world = World(config)
    events = list(world.events())
    assert [e.start_s for e in events] == sorted(e.start_s for e in events)
    for event in events:
        assert 1 <= event.end_s - event.start_s <= 4
        assert event.end_s == int(event.end_s)
        assert 2 * event.start_s == int(2 * event.start_s)
    for half in range(2 * 130):
        shown = world.visible(half / 2)
        assert len(shown) <= 2
        for attribute in ("shape", "colour", "place"):
            assert len({getattr(e, attribute) for e in shown}) == len(shown)


@given(
    seed=SEEDS,
    n=st.integers(1, 4),
    rate=st.floats(0, 30),
    before=st.sampled_from([0, 60, 104, 240]),
)
def test_the_evidence_depends_on_neither_rate_nor_time_and_shares_no_look_with_others(
    seed: int, n: int, rate: float, before: int
) -> None:
    world = World(WorldConfig(seed, 400, rate, evidence_events=n, evidence_s=16, before_s=before))
    alone = World(WorldConfig(seed, 400, 0.0, evidence_events=n, evidence_s=16))
    evidence = [event.later(before) for event in alone.events()]
    others = [event for event in world.events() if event not in evidence]
    assert [event for event in world.events() if before <= event.start_s < before + 16] == evidence
    assert all(
        event in world.visible(event.start_s) and event.end_s <= before + 16 for event in evidence
    )
    assert not [event for event in others if event.start_s < before < event.end_s]
    for attribute in ("shape", "colour", "place"):
        mine = {getattr(event, attribute) for event in evidence}
        assert len(mine) == n
        assert not mine & {getattr(event, attribute) for event in others}
    assert len({event.shape for event in world.events()}) < 8


@given(seed=SEEDS, similarity=st.floats(0.2, 1.0), again=st.sampled_from([None, 180]))
def test_look_alikes_have_colour_and_place_of_the_evidence_and_never_its_shape(
    seed: int, similarity: float, again: int | None
) -> None:
    config = WorldConfig(
        seed,
        400,
        30.0,
        evidence_events=4,
        evidence_s=16,
        before_s=60,
        again_s=again,
        distractor_similarity=similarity,
    )
    world = World(config)
    shown = [e for e in world.events() if 60 <= e.start_s < 76]
    again_shown = world.repeats()
    others = [e for e in world.events() if e not in shown and e not in again_shown]
    models = {(e.colour, e.place) for e in shown}
    twins = [e for e in others if (e.colour, e.place) in models]
    assert abs(len(twins) / len(others) - similarity) < 0.25
    assert not {e.shape for e in shown} & {e.shape for e in others}
    for e in others:
        assert e in twins or (
            e.colour not in {c for c, _ in models} and e.place not in {p for _, p in models}
        )
    for half in range(2 * 400):
        for attribute in ("shape", "colour", "place"):
            visible = [getattr(e, attribute) for e in world.visible(half / 2)]
            assert len(set(visible)) == len(visible)


def test_the_worlds_of_stored_results_are_drawn_as_they_were() -> None:
    digest = hashlib.sha256()
    for config in (
        WorldConfig(5_000_000, 300, 20.0, evidence_events=4, evidence_s=16),
        WorldConfig(7, 300, 20.0, evidence_events=4, evidence_s=16, before_s=120),
        WorldConfig(
            5_002_000,
            300,
            20.0,
            evidence_events=4,
            evidence_s=16,
            again_s=120,
            distractor_similarity=0.5,
        ),
        WorldConfig(9, 130, 12.0, 0.5, cut_s=None),
    ):
        world = World(config)
        digest.update(repr(list(world.events())).encode())
        digest.update(world.frame(33.5).tobytes())
    assert digest.hexdigest() == "93e19c797b8decc1e55462c100dece45707ca6773a4ced0c8ca37922005fbcbd"


def test_a_natural_backdrop_falls_with_frequency_drifts_and_hides_no_shape() -> None:
    plain, natural = (
        World(WorldConfig(5, 60, 12.0, cut_s=(20, 20), backdrop=backdrop))
        for backdrop in ("plain", "natural")
    )
    assert list(plain.events()) == list(natural.events())
    noise = draw_noise((5, 0), 3.0, 84)
    power = np.abs(np.fft.fft2(noise.mean(-1))) ** 2
    radius = np.hypot(np.fft.fftfreq(84)[:, None], np.fft.fftfreq(84)[None, :])
    low, high = (power[(radius > a) & (radius < b)].mean() for a, b in ((0.02, 0.04), (0.16, 0.32)))
    # Power falls as 1 / f^2: 64 between octaves that lie a factor of 8 apart.
    assert 16 < low / high < 256
    assert abs(noise.mean()) < 1
    assert not np.array_equal(draw_noise((5, 0), 3.0, 84), draw_noise((5, 0), 6.0, 84))
    event = next(e for e in natural.events() if e.end_s - e.start_s >= 2)
    assert _looks_like(natural.frame(event.start_s + 0.5), event, event.start_s + 0.5)


def test_the_rate_of_events_is_the_one_asked_for() -> None:
    counts = [len(list(World(WorldConfig(seed, 600, 13.0)).events())) for seed in range(5)]
    assert abs(np.mean(counts) - 130) < 8


@given(seed=SEEDS)
def test_scenes_cut_at_whole_seconds_within_the_interval(seed: int) -> None:
    world = World(WorldConfig(seed, 240, cut_s=(6, 20)))
    at = 0
    scenes = []
    while at < 240:
        scene = world.scene(at)
        assert scene.start_s == at
        # The last scene of a block includes a rest that is too short to be a scene.
        assert 6 <= scene.end_s - scene.start_s < 26
        scenes.append(scene.scenery)
        at = scene.end_s
    assert len(set(scenes)) == len(scenes)


def test_without_cuts_the_background_never_changes() -> None:
    world = World(WorldConfig(4, 700, cut_s=None))
    assert world.scene(0) == world.scene(695)


def _looks_like(frame: np.ndarray, event: Event, time_s: float) -> bool:
    """Return True if enough pixels near the event's centre have its colour."""
    x, y = event.centre(time_s)
    box = frame[max(0, int(y) - 8) : int(y) + 9, max(0, int(x) - 8) : int(x) + 9].astype(float)
    near = np.abs(box - np.asarray(COLOURS[COLOUR_NAMES[event.colour]])).max(-1) < 20
    return int(near.sum()) >= 30


@pytest.mark.parametrize("seed", [3, 17, 101])
def test_an_event_is_in_the_frames_exactly_while_it_is_visible(seed: int) -> None:
    world = World(WorldConfig(seed, 60, 9.0, moving=0.5))
    events = list(world.events())
    assert len(events) >= 5
    for event in events:
        for time_s in np.arange(max(event.start_s - 1, 0), event.end_s + 1, 0.5):
            shown = event.start_s <= time_s < event.end_s
            alike = [
                e for e in world.visible(time_s) if e is not event and e.colour == event.colour
            ]
            if not alike:
                assert _looks_like(world.frame(time_s), event, time_s) == shown


def test_moving_shapes_move_and_their_centres_stay_in_the_cell_where_they_appeared() -> None:
    moved = 0
    for event in World(WorldConfig(8, 600, 20.0, moving=1.0)).events():
        row, column = divmod(event.place, 3)
        start = event.centre(event.start_s)
        for time_s in np.arange(event.start_s, event.end_s, 0.25):
            x, y = event.centre(time_s)
            assert (int(y // 28), int(x // 28)) == (row, column)
        moved += start != event.centre(event.end_s - 0.25)
    assert moved > 50


@pytest.mark.parametrize("side", [168, 336, 672])
def test_a_large_frame_looks_like_the_small_one_after_area_resize(side: int) -> None:
    world = World(WorldConfig(5, 60, 20.0, moving=0.5))
    for time_s in (1.0, 7.5, 13.0, 33.5):
        large = Image.fromarray(world.frame(time_s, side)).resize((84, 84), Image.Resampling.BOX)
        difference = np.abs(np.asarray(large, float) - world.frame(time_s).astype(float))
        assert difference.max() <= 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"length_s": 0},
        {"events_per_minute": 41},
        {"moving": -0.1},
        {"overlap": 1.5},
        {"cut_s": (9, 3)},
        {"cut_s": (1, 61)},
        {"evidence_events": 5},
        {"evidence_events": 3, "evidence_s": 11},
        {"distractor_similarity": 1.5},
        {"backdrop": "forest"},
        {"counted": 4},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        WorldConfig(**wrong)
    assert next(reversed(wrong)) in error.value.message


@pytest.mark.parametrize("before_s", [50, -60])
def test_evidence_that_crosses_a_full_minute_is_refused(before_s: int) -> None:
    with pytest.raises(ConfigError, match="crosses a full minute"):
        WorldConfig(evidence_events=4, evidence_s=16, length_s=300, before_s=before_s)


def test_the_world_and_its_questions_need_no_torch() -> None:
    heavy = "sum(name in sys.modules for name in ('torch', 'transformers', 'av'))"
    code = f"import sys; import samples.worlds.world, samples.worlds.questions; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
