"""Streams that share forwards of one model: each ends in the state of its single run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.backbones import load_backbone
from protokv.core.attention import LocalKV
from protokv.core.backbone import Backbone
from protokv.core.context import EmptyContext
from protokv.core.session import Session
from protokv.errors import SourceError
from protokv.fleet import Job, Recipe
from protokv.fleet.joint import JointKV, Stream
from protokv.fleet.run import WorkerDied
from protokv.fleet.shared_forwards import SharedForwards
from protokv.ingestion import ingest
from protokv.memories import MemoryConfig
from protokv.state.api import load_state
from protokv.state.checkpoint import to_state
from protokv.state.snapshot import State
from tests.conftest import random_frames
from tests.fleet.conftest import InlinePool, ends, outcomes
from tests.tolerance import forward_terms, near

# These memories choose and round nothing, so no near-tie can separate a stream from its single run.
CONFIGS = [MemoryConfig.of(name, budget=40) for name in ("full", "sliding-window", "last-frames")]


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


def watch(backbone: Backbone, stream: int, steps: int) -> State:
    session = Session.start(backbone, CONFIGS[stream % len(CONFIGS)])
    for step in range(steps):
        session.watch(random_frames(100 * stream + step, backbone.frames_per_step))
    return to_state(session)


def check_alike(model: Backbone, found: State, expected: State) -> None:
    """Compare states up to the order of sums, which kernels choose by the number of rows."""
    assert replace(found, tensors={}) == replace(expected, tensors={})
    terms = forward_terms(2 * model.layers, model.embed_text(model.prefix_ids).shape[1], 100)
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, **near(tensor, terms))


@pytest.mark.parametrize("name", ["embedded", "tiny"])
def test_streams_of_any_length_end_in_the_states_of_single_runs(name: str, request: pytest.FixtureRequest) -> None:
    """A full cache holds the keys and values of every step."""
    model: Backbone = request.getfixturevalue(name)
    lengths = [3, 6, 2, 5]
    shared = SharedForwards(model, len(lengths))

    def watch_shared(stream: int) -> State:
        with shared.member() as backbone:
            return watch(backbone, stream, lengths[stream])

    with ThreadPoolExecutor(len(lengths)) as threads:
        joined = list(threads.map(watch_shared, range(len(lengths))))
    # Four prompts, and the joint steps of the longest stream.
    assert shared.forwards == max(lengths) + 4
    for stream, state in enumerate(joined):
        check_alike(model, state, watch(model, stream, lengths[stream]))


def test_an_error_in_a_shared_forward_reaches_every_stream_and_hangs_none(embedded: Backbone) -> None:
    shared = SharedForwards(embedded, 3)

    def fail(_: int) -> None:
        with shared.member() as backbone:
            Session.start(backbone, CONFIGS[0])
            with pytest.raises(RuntimeError):
                backbone.forward(torch.zeros(2, 3), torch.zeros(2, 3), EmptyContext(), backbone.new_local_kv(2))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(fail, range(3), timeout=60)) == [None] * 3


def test_a_fleet_in_batches_ends_in_the_states_of_single_runs(
    films: Path, jobs: list[Job], recipe: Recipe, embedded: Backbone, tmp_path: Path
) -> None:
    config = CONFIGS[1]
    recipe = Recipe(place=recipe.place, options=replace(recipe.options, config=config))
    bad = Job(str(films / "broken.mp4"), "broken")
    found = outcomes([bad, *jobs], InlinePool(recipe), recipe, batch=3)
    assert ends(found) == dict.fromkeys(("a", "b", "sub/c"), ("watched", 1)) | {"broken": ("failed", 1)}
    for job in jobs:
        alone = tmp_path / f"{Path(job.key).name}.safetensors"
        list(ingest(job.source, alone, config, backbone=embedded))
        check_alike(embedded, load_state(Path(recipe.place) / f"{job.key}.safetensors"), load_state(alone))
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
