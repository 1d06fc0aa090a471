"""What an embedded model saw of a source: told in time, kept in the state, and the same however a run was cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

import protokv
from protokv.ingestion import BeyondModel, Started, Summary, ingest
from protokv.mini.looked import LONELY
from protokv.mini.world import World, WorldConfig
from protokv.state.api import load_state
from protokv.state.snapshot import State
from protokv.state.watched import beyond_model, is_beyond, sources_of
from protokv.video import Frame
from protokv.video.source import from_shown_at
from tests.mock_backbone import MockBackbone
from tests.prepared import RATE, Prepared
from tests.state.test_checkpoint import CONFIGS

CONFIG = CONFIGS["durable"]
MINI = MockBackbone("protokv/mini")


class Drawn(Prepared):
    """A procedural world, or a part of it in one colour, two frames a second."""

    def __init__(self, n_frames: int, seed: int = 4_910_001, colour: int | None = None) -> None:
        super().__init__(seed, n_frames)
        self._world, self._colour = World(WorldConfig(seed=seed)), colour

    def frames(self, start_s: float = 0.0, **_: object) -> Iterator[Frame]:
        def frame(i: int) -> Frame:
            picture = self._world.frame(i / RATE)
            if self._colour is not None:
                picture[:] = self._colour
            return Frame(i / RATE, picture, 1 / RATE)

        return from_shown_at(map(frame, range(self._n)), start_s)


def test_another_video_is_told_once_and_early_and_a_world_is_not(tmp_path: Path) -> None:
    events = list(ingest(Prepared(1, 20), tmp_path / "a.safetensors", CONFIG, backbone=MINI))
    assert events[2] == BeyondModel("1.mp4", 1.0)
    assert [type(event) for event in events].count(BeyondModel) == 1
    assert isinstance(events[-1], Summary)
    assert events[-1].beyond_model
    events = list(ingest(Drawn(20), tmp_path / "b.safetensors", CONFIG, backbone=MINI))
    assert not any(isinstance(event, BeyondModel) for event in events)
    assert not events[-1].beyond_model


def test_a_real_model_looks_at_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    events = list(ingest(Prepared(1, 20), path, CONFIG, backbone=MockBackbone()))
    assert not any(isinstance(event, BeyondModel) for event in events)
    state = load_state(path)
    assert "looked" not in state.source
    assert is_beyond(state) is None


@pytest.mark.parametrize("source", [Prepared(1, 2 * LONELY + 20), Drawn(2 * LONELY + 20)], ids=["other", "world"])
def test_a_run_in_parts_ends_in_the_bytes_of_a_whole_run(source: Prepared, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    list(ingest(source, whole, CONFIG, backbone=MINI))
    told = 0
    for n_events in (4, LONELY + 5, None):
        events = ingest(source, parts, CONFIG, backbone=MINI)
        told += sum(isinstance(event, BeyondModel) for event in islice(events, n_events))
        events.close()
    assert parts.read_bytes() == whole.read_bytes()
    assert told == (not isinstance(source, Drawn))


def test_a_continued_run_knows_what_an_earlier_one_saw(tmp_path: Path) -> None:
    path, source = tmp_path / "s.safetensors", Prepared(1, 20)
    events = ingest(source, path, CONFIG, backbone=MINI)
    assert next(event.beyond_model for event in events if isinstance(event, Started)) is False
    next(event for event in events if isinstance(event, BeyondModel))
    events.close()
    assert next(ingest(source, path, CONFIG, backbone=MINI)).beyond_model is True


def test_pictures_without_any_shape_are_another_video_after_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    events = list(ingest(Drawn(2 * LONELY + 4, colour=60), path, CONFIG, backbone=MINI))
    assert [event.stream_time_s for event in events if isinstance(event, BeyondModel)] == [float(LONELY)]


def test_each_source_of_a_state_is_told_apart_and_the_session_and_its_answers_say_so(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    list(ingest(Drawn(20), path, CONFIG, backbone=MINI))
    session = protokv.load(path, MINI)
    assert not session.beyond_model
    assert session.ask("what is it").beyond_model is False
    list(ingest(Prepared(7, 6), path, CONFIG, backbone=MINI, append=True))
    state = load_state(path)
    assert [one["beyond_model"] for one in sources_of(state)] == [False, True]
    assert beyond_model(state) == ["7.mp4"]
    assert is_beyond(state) is True
    session = protokv.load(path, MINI)
    assert session.beyond_model == ["7.mp4"]
    assert session.ask("what is it").beyond_model is True


@pytest.mark.parametrize("looked", [None, {"shapes": "many"}, [1, 2, 3]])
def test_of_a_state_without_counts_or_with_impossible_ones_nothing_is_known(looked: object, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    list(ingest(Prepared(1, 8), path, CONFIG, backbone=MINI))
    state: State = load_state(path)
    older = replace(state, source={**state.source, "looked": looked})
    assert is_beyond(older) is None
    assert beyond_model(older) == []
