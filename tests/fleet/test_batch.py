"""Streams that share forwards of one model: each ends in the state of its single run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.backbones import load_backbone
from protokv.backbones.base import Backbone
from protokv.config import MemoryConfig
from protokv.core.attention import LocalKV
from protokv.core.context import EmptyContext
from protokv.core.memory import StepKV
from protokv.core.session import Session
from protokv.core.snapshot import State
from protokv.errors import SourceError
from protokv.extras.joint import JointKV, Stream
from protokv.fleet import Job, Recipe
from protokv.fleet.run import WorkerDied
from protokv.fleet.shared_forwards import SharedForwards
from protokv.ingestion import ingest
from protokv.storage.api import load_state
from protokv.storage.checkpoint import to_state
from tests.conftest import random_frames
from tests.fleet.conftest import CONFIG, InlinePool, ends, outcomes
from tests.storage.test_checkpoint import CONFIGS
from tests.tolerance import forward_terms, near


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99))
def test_attention_of_joined_streams_is_that_of_each_alone(counts: list[int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(heads, sum(counts), 4, generator=g) for heads in (4, 2, 2))

    def tails() -> list[LocalKV]:
        return [LocalKV(1, 2, n, 4, dtype=torch.float32, device=torch.device("cpu")) for n in counts]

    own = tails()
    joint = JointKV([Stream(n, EmptyContext(), tail) for n, tail in zip(counts, own, strict=True)])
    together = joint.attend(0, query, key, value, EmptyContext(), 0.5)
    first = 0
    for n, mine, tail in zip(counts, own, tails(), strict=True):
        part = slice(first, first + n)
        alone = tail.attend(0, query[:, part], key[:, part], value[:, part], EmptyContext(), 0.5)
        assert torch.equal(together[:, part], alone)
        assert torch.equal(mine.read(0)[0], tail.read(0)[0])
        first += n


@pytest.fixture(scope="module")
def embedded() -> Backbone:
    return load_backbone(device="cpu")


@dataclass
class Watched:
    """A stream: its state before each step and after the last, and the steps that its memory received."""

    states: list[State]
    steps: list[StepKV]


def watch_all(model: Backbone, lengths: list[int]) -> tuple[list[Watched], int]:
    """Watch streams of these lengths side by side, each with another memory; return them and the number of forwards."""
    shared = SharedForwards(model, len(lengths))
    found = [Watched([], []) for _ in lengths]

    def watch(i: int) -> None:
        with shared.member() as backbone:
            session = Session.start(backbone, config_of(i))
            take_notes(session, found[i].steps)
            found[i].states.append(state_of(session))
            for step in range(lengths[i]):
                session.watch(frames_of(model, i, step))
                found[i].states.append(state_of(session))

    threads = [threading.Thread(target=watch, args=(i,)) for i in range(len(lengths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, shared.forwards


def config_of(i: int) -> MemoryConfig:
    return list(CONFIGS.values())[i % len(CONFIGS)]


def frames_of(model: Backbone, i: int, step: int) -> np.ndarray:
    return random_frames(100 * i + step, model.frames_per_step)


def take_notes(session: Session, steps: list[StepKV]) -> None:
    """Record the steps that the memory of a session receives."""
    append = session.memory.append
    session.memory.append = lambda step: steps.append(step) or append(step)  # type: ignore[func-returns-value,method-assign]


def state_of(session: Session) -> State:
    """Return a copy of the state of a session, with all slots."""
    return replace(to_state(session), tensors={name: tensor.clone() for name, tensor in session.tensors().items()})


def resumed(model: Backbone, i: int, state: State) -> Session:
    own = {name: tensor.clone() for name, tensor in state.tensors.items()}
    return Session.resume(model, config_of(i), replace(state, tensors=own))


def assert_alike(model: Backbone, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare up to the order of sums, which kernels choose by the number of rows."""
    terms = forward_terms(2 * model.layers, model.embed_text(model.prefix_ids).shape[1], 100)
    torch.testing.assert_close(found, expected, **near(expected, terms))


@pytest.mark.parametrize("name", ["embedded", "tiny"])
def test_each_step_of_streams_of_any_length_is_that_of_the_stream_alone(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Compare step by step: a memory rounds and chooses, so a near-tie could separate two whole streams."""
    model: Backbone = request.getfixturevalue(name)
    lengths = [3, 6, 2, 5]
    joined, forwards = watch_all(model, lengths)
    for i, stream in enumerate(joined):
        started = state_of(Session.start(model, config_of(i)))
        assert replace(started, tensors={}) == replace(stream.states[0], tensors={})
        for tensor, expected in started.tensors.items():
            assert_alike(model, stream.states[0].tensors[tensor], expected)
        for number, (before, after) in enumerate(pairwise(stream.states)):
            alone, steps = resumed(model, i, before), []
            take_notes(alone, steps)
            alone.watch(frames_of(model, i, number))
            assert replace(state_of(alone), tensors={}) == replace(after, tensors={})
            (other,), mine = steps, stream.steps[number]
            assert_alike(model, mine.keys, other.keys)
            assert_alike(model, mine.values, other.values)
            assert torch.equal(mine.positions, other.positions)
            assert torch.equal(mine.coordinates, other.coordinates)
            # With the same step, a memory does the same operations, to the bit.
            again = resumed(model, i, before)
            again.memory.append(stream.steps[number])
            made = again.tensors()
            assert made.keys() == after.tensors.keys()
            assert all(torch.equal(made[name], tensor) for name, tensor in after.tensors.items())
    # Four prompts, and the joint steps of the longest stream.
    assert forwards == max(lengths) + 4


def test_an_error_in_a_shared_forward_reaches_every_stream_and_hangs_none(embedded: Backbone) -> None:
    shared, errors = SharedForwards(embedded, 3), []

    def watch() -> None:
        with shared.member() as backbone:
            session = Session.start(backbone, CONFIG)
            try:
                session.watch(random_frames(1, embedded.frames_per_step))
                backbone.forward(torch.zeros(2, 3), torch.zeros(2, 3), EmptyContext(), backbone.new_local_kv(2))
            except RuntimeError as error:
                errors.append(error)

    threads = [threading.Thread(target=watch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 3


def test_a_fleet_in_batches_ends_in_the_states_of_single_runs(
    films: Path, jobs: list[Job], recipe: Recipe, embedded: Backbone, tmp_path: Path
) -> None:
    # This memory chooses and rounds nothing, so no near-tie can separate two streams.
    config = MemoryConfig.of("sliding-window", budget=40)
    recipe = Recipe(place=recipe.place, options=replace(recipe.options, config=config))
    bad = Job(str(films / "broken.mp4"), "broken")
    found = outcomes([bad, *jobs], InlinePool(recipe), recipe, batch=3)
    assert ends(found) == dict.fromkeys(("a", "b", "sub/c"), ("watched", 1)) | {"broken": ("failed", 1)}
    for job in jobs:
        alone = tmp_path / f"{Path(job.key).name}.safetensors"
        list(ingest(job.source, alone, config, backbone=embedded))
        mine, expected = load_state(Path(recipe.place) / f"{job.key}.safetensors"), load_state(alone)
        assert replace(mine, tensors={}) == replace(expected, tensors={})
        for name, tensor in expected.tensors.items():
            assert_alike(embedded, mine.tensors[name], tensor)
    with pytest.raises(SourceError):
        list(ingest(bad.source, tmp_path / "x.safetensors", config, backbone=embedded))


def test_videos_whose_worker_died_together_are_tried_once_more_alone(jobs: list[Job], recipe: Recipe) -> None:
    calls: list[str] = []

    def between(index: int, verb: str, args: tuple[object, ...]) -> None:
        if verb.startswith("watch"):
            calls.append(verb)
        if verb == "watch_together" or (verb == "watch" and args[0] == jobs[1]):
            raise WorkerDied("it was killed")

    found = outcomes(jobs, InlinePool(recipe, 1, between), recipe, batch=8)
    assert calls == ["watch_together", "watch", "watch", "watch"]
    assert ends(found) == {"a": ("watched", 2), "b": ("failed", 2), "sub/c": ("watched", 2)}
