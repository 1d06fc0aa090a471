"""Several streams whose steps share forwards of one model: each ends in the state of its single run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.backbones import load_backbone
from protokv.backbones.base import Backbone
from protokv.core.attention import LocalKV
from protokv.core.context import EmptyContext
from protokv.core.session import Session
from protokv.errors import SourceError
from protokv.extras.joint import JointKV, Stream
from protokv.fleet import Job, Recipe
from protokv.fleet.run import WorkerDied
from protokv.fleet.shared_forwards import SharedForwards
from protokv.ingestion import ingest
from protokv.storage.api import load_state
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


def watch_all(model: Backbone, lengths: list[int], together: bool) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Streams of so many steps, with one memory after the other; and how often the model was asked."""
    shared = SharedForwards(model, len(lengths) if together else 1)
    found: dict[int, dict[str, torch.Tensor]] = {}

    def watch(i: int) -> None:
        with shared.member() as backbone:
            session = Session.start(backbone, list(CONFIGS.values())[i % len(CONFIGS)])
            for step in range(lengths[i]):
                session.watch(random_frames(100 * i + step, model.frames_per_step))
            found[i] = {name: tensor.clone() for name, tensor in session.tensors().items()}

    if together:
        threads = [threading.Thread(target=watch, args=(i,)) for i in range(len(lengths))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[i] for i in range(len(lengths))], shared.forwards
    forwards = 0
    for i in range(len(lengths)):
        shared = SharedForwards(model, 1)
        watch(i)
        forwards += shared.forwards
    return [found[i] for i in range(len(lengths))], forwards


def assert_alike(model: Backbone, state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Equal up to the order of sums in the model; what is counted and chosen is equal."""
    terms = forward_terms(2 * model.layers, model.embed_text(model.prefix_ids).shape[1], 100)
    for name, tensor in expected.items():
        allowed = near(tensor, terms) if tensor.is_floating_point() else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(state[name], tensor, **allowed, msg=name)


@pytest.mark.parametrize("name", ["embedded", "tiny"])
def test_streams_of_any_length_end_as_they_do_alone(name: str, request: pytest.FixtureRequest) -> None:
    """Up to the order of sums, which kernels choose by the number of rows."""
    model: Backbone = request.getfixturevalue(name)
    lengths = [5, 9, 2, 7]
    alone, one_by_one = watch_all(model, lengths, together=False)
    joined, forwards = watch_all(model, lengths, together=True)
    for single, mine in zip(alone, joined, strict=True):
        assert single.keys() == mine.keys()
        assert_alike(model, mine, single)
    # Four prompts, and as many joint steps as the longest stream has.
    assert (one_by_one, forwards) == (sum(lengths) + 4, max(lengths) + 4)


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
    recipe = Recipe(place=recipe.place, options=recipe.options)
    bad = Job(str(films / "broken.mp4"), "broken")
    found = outcomes([bad, *jobs], InlinePool(recipe), recipe, batch=3)
    assert ends(found) == dict.fromkeys(("a", "b", "sub/c"), ("watched", 1)) | {"broken": ("failed", 1)}
    for job in jobs:
        alone = tmp_path / f"{Path(job.key).name}.safetensors"
        list(ingest(job.source, alone, CONFIG, backbone=embedded))
        mine, expected = load_state(Path(recipe.place) / f"{job.key}.safetensors"), load_state(alone)
        assert replace(mine, tensors={}) == replace(expected, tensors={})
        assert_alike(embedded, mine.tensors, expected.tensors)
    with pytest.raises(SourceError):
        list(ingest(bad.source, tmp_path / "x.safetensors", CONFIG, backbone=embedded))


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
