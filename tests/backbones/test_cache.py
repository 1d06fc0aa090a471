"""`protokv.Cache` in models of transformers that were loaded without us."""

import copy
import doctest
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, DynamicCache

import protokv
from protokv.backbones.stream_cache import CACHE_ARGUMENT, StreamCache, StreamCacheLayer
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.errors import ConfigError, StateMismatch
from protokv.memories import MEMORIES, DurableConfig
from protokv.stream import cache as home
from protokv.stream.session import Session
from protokv.texts import Keywords
from tests.backbones.texts import texts, watch
from tests.backbones.tiny import BUILDERS, write_gemma4
from tests.backbones.upstream import Upstream
from tests.conftest import random_frames
from tests.core.streams import copy_of, same
from tests.stream import test_steps

# The order of sums differs; logits are of the size of 10.
NEAR: Keywords = {"atol": 2e-4, "rtol": 2e-4}
ANSWER: Keywords = {
    "max_new_tokens": 5,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return open_model(folder)


@pytest.fixture(scope="module")
def qwen(tiny_folder: Path) -> Any:
    return open_model(tiny_folder, "protokv")


def open_model(folder: Path, way: str = "sdpa") -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=way
    ).eval()


def answer(model: Any, question: Keywords) -> list[int]:
    return model.generate(**question, **ANSWER)[0, question["input_ids"].shape[1] :].tolist()


def test_text_in_steps_equals_a_dynamic_cache_until_tokens_are_evicted(model: Any) -> None:
    steps, (question,) = texts(6), texts(1, 7, seed=2)
    cache = protokv.Cache(model, 400)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = torch.cat(
            [model(input_ids=ids, **{CACHE_ARGUMENT: plain}).logits[0] for ids in steps]
        )
    torch.testing.assert_close(watch(model, cache, steps), expected, **NEAR)
    whole = torch.cat((*steps, question), 1)
    expected_ids = model.generate(input_ids=whole, **{CACHE_ARGUMENT: plain}, **ANSWER)[
        0, whole.shape[1] :
    ].tolist()
    assert answer(model, cache.question({"input_ids": question})) == expected_ids
    # The same by hand: transformers takes ids for new tokens if the mask is longer.
    by_hand = {
        "attention_mask": torch.ones(1, cache.seen + 7, dtype=torch.int64),
        CACHE_ARGUMENT: cache.fork(),
    }
    assert answer(model, {"input_ids": question} | by_hand) == expected_ids


def test_a_long_stream_has_a_bound_and_comes_back_to_the_same_bytes(
    model: Any, tmp_path: Path
) -> None:
    cache = protokv.Cache(model, 24, sink=2)
    watch(model, cache, texts(14))
    size = cache.nbytes
    watch(model, cache, texts(6, seed=3))
    assert (cache.nbytes, cache.seen) == (size, 200)
    assert cache.memory is not None
    assert cache.context.visible_tokens() <= 24 + 2
    (question,) = texts(1, 7, seed=2)
    before = answer(model, cache.question({"input_ids": question}))
    cache.save(tmp_path / "one.safetensors")
    again = protokv.Cache.load(tmp_path / "one.safetensors", model)
    assert (again.seen, again.nbytes, again.stream.clock) == (200, size, cache.stream.clock)
    assert answer(model, again.question({"input_ids": question})) == before
    more = texts(3, seed=4)
    assert torch.equal(watch(model, cache, more), watch(model, again, more))
    cache.save(tmp_path / "two.safetensors")
    again.save(tmp_path / "one.safetensors")
    one, two = (tmp_path / f"{name}.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_model_answers_as_before_with_a_cache_beside_it(folder: Path, model: Any) -> None:
    untouched = open_model(folder)
    (ids,) = texts(1, 12)
    watch(model, protokv.Cache(model, 400), texts(2))
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    assert answer(model, {"input_ids": ids}) == answer(untouched, {"input_ids": ids})


@torch.no_grad()
def test_a_chat_about_a_whole_video_is_answered_as_without_a_cache(
    family: str, folder: Path, model: Any
) -> None:
    """What a model card says, with one line changed: `model.generate(**cache.question(inputs))`."""
    frames = 2 if family.startswith("qwen") else 1
    video = [random_frames(seed, frames) for seed in range(3)]
    inputs = Upstream(family, folder).inputs(video, "who is the star ?", 1.0)
    expected = answer(model, inputs)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    assert answer(model, protokv.Cache(model, memory="full").question(inputs)) == expected


def test_pictures_that_see_both_ways_do_so_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILDERS, "gemma4", partial(write_gemma4, window=40, large=True))
    test_steps.test_steps_of_frames_are_the_prompt_of_the_processor("gemma4", tmp_path)


@pytest.mark.parametrize("way", ["protokv", "eager"])
def test_a_cache_sets_the_attention_of_a_model_however_it_was_loaded(
    tiny_folder: Path, way: str
) -> None:
    one, other = (open_model(tiny_folder, loaded) for loaded in (way, "sdpa"))
    found, expected = (watch(held, protokv.Cache(held, 24), texts(8)) for held in (one, other))
    assert torch.equal(found, expected)


def test_the_example_of_the_class_runs(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {
        "model": qwen,
        "steps": [{"input_ids": ids} for ids in texts(3)],
        "question": {"input_ids": texts(1)[0]},
    }
    (example,) = (
        one for one in doctest.DocTestFinder().find(home.Cache, globs=named) if one.examples
    )
    found = doctest.DocTestRunner().run(example)
    assert (found.attempted, found.failed) == (len(example.examples), 0)


def test_asking_changes_nothing_and_a_fork_ends_with_the_next_commit(qwen: Any) -> None:
    cache, (ids,) = protokv.Cache(qwen, 24), texts(1, seed=5)
    watch(qwen, cache, texts(8))
    fork = cache.fork()
    assert cache.memory is not None
    before = copy_of(cache.memory)
    assert answer(qwen, cache.question({"input_ids": ids})) == answer(
        qwen, cache.question({"input_ids": ids})
    )
    assert same(cache.memory.tensors(), before)
    watch(qwen, cache, [ids])
    with pytest.raises(ConfigError, match="has taken a step since"):
        qwen(input_ids=ids, **{CACHE_ARGUMENT: fork})


def test_a_deep_copy_has_a_memory_of_its_own_and_a_reset_begins_anew(qwen: Any) -> None:
    cache = protokv.Cache(qwen, 24)
    first = watch(qwen, cache, texts(8))
    other = copy.deepcopy(cache)
    assert other.decoder.model is qwen
    later = watch(qwen, other, texts(8, seed=4))
    assert (cache.seen, other.seen) == (80, 160)
    assert torch.equal(watch(qwen, cache, texts(8, seed=4)), later)
    cache.reset()
    assert (cache.seen, cache.nbytes, cache.get_seq_length()) == (0, 0, 0)
    assert torch.equal(watch(qwen, cache, texts(8)), first)


def test_what_a_step_and_a_question_forwarded_is_gone_with_them(qwen: Any, tiny: Backbone) -> None:
    # On a device it would take gigabytes until Python looks for cycles.
    cache = protokv.Cache(qwen, 24)
    session = Session.start(tiny, DurableConfig(budget=24))
    watch(qwen, cache, texts(3))
    gc.collect()
    gc.disable()
    try:
        watch(qwen, cache, texts(1))
        answer(qwen, cache.question({"input_ids": texts(1)[0]}))
        session.watch(random_frames(0))
        session.ask("what is red ?", Decoding(2, temperature=0))
        left = {id(one) for one in gc.get_objects() if isinstance(one, StreamCache)}
        assert left == {id(cache), id(cache.stream.cache), id(session.cache)}
        assert session.cache.length == 0
    finally:
        gc.enable()


def test_a_cropped_step_is_as_if_it_had_not_been_forwarded(qwen: Any) -> None:
    one, other, (ids,) = protokv.Cache(qwen, 64), protokv.Cache(qwen, 64), texts(1, seed=5)
    for cache in (one, other):
        watch(qwen, cache, texts(2))
    with torch.no_grad():
        qwen(**one.step({"input_ids": ids}))
        qwen(**one.step({"input_ids": ids}))
    one.crop(10)
    one.crop(10)
    assert torch.equal(watch(qwen, one, [ids]), watch(qwen, other, [ids]))


def test_a_prefix_is_kept_for_ever_and_comes_first(qwen: Any) -> None:
    prefix, step = texts(2)
    cache = protokv.Cache(qwen, 24)
    with torch.no_grad():
        qwen(**cache.step({"input_ids": prefix}))
    cache.commit(prefix=True)
    assert cache.memory is not None
    assert cache.memory.tensors()["sink.keys"].shape[2] == 10
    with torch.no_grad():
        qwen(**cache.step({"input_ids": step}))
    with pytest.raises(ConfigError, match="comes first"):
        cache.commit(prefix=True)


@pytest.mark.parametrize("memory", list(MEMORIES))
def test_every_memory_of_keys_and_values_serves(qwen: Any, memory: str) -> None:
    if memory in ("hermes", "dycoke"):
        with pytest.raises(ConfigError, match="more than keys and values"):
            protokv.Cache(qwen, 24, memory)
        return
    cache = protokv.Cache(qwen, 24, memory, positions="stream")
    watch(qwen, cache, texts(12))
    assert len(answer(qwen, cache.question({"input_ids": texts(1)[0]}))) == 5


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_mode_of_a_forward_may_change(qwen: Any, mode: Any) -> None:
    cache = protokv.Cache(qwen, 24)
    for ids in texts(8):
        with mode():
            qwen(**cache.step({"input_ids": ids}))
        cache.commit()
    with mode():
        qwen(**cache.step({"input_ids": ids}))
        cache.commit()
    watch(qwen, cache, texts(8))
    assert not any(tensor.requires_grad for tensor in cache.stream.memory.tensors().values())


def test_what_no_memory_serves_is_refused(qwen: Any, tmp_path: Path) -> None:
    cache, (ids,) = protokv.Cache(qwen, 24), texts(1)
    with pytest.raises(ConfigError, match="batch of 2"):
        qwen(input_ids=ids.expand(2, -1), **{CACHE_ARGUMENT: cache})
    with pytest.raises(ConfigError, match="with input_ids, got str"):
        cache.step("x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has not watched, so it knows no prompt"):
        cache.question("x")
    with pytest.raises(ConfigError, match="that is loaded, got Qwen2_5_VLConfig"):
        protokv.Cache(qwen.config)
    for take in (protokv.Cache, lambda model: protokv.watching(model, None).__enter__()):
        with pytest.raises(ConfigError, match="a model of transformers that is loaded, got str"):
            take("Qwen/Qwen2.5-VL-7B-Instruct")
    with pytest.raises(ConfigError, match="differ in size"):
        StreamCacheLayer(cache, 0).update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 8))
    with pytest.raises(ConfigError, match="positions"):
        protokv.Cache(qwen, 24, positions="compact")
    with pytest.raises(ConfigError, match="only committed"):
        cache.save(tmp_path / "none.safetensors")
    watch(qwen, cache, texts(2))
    with pytest.raises(ConfigError, match=r"use cache\.question"):
        qwen.generate(input_ids=ids, **{CACHE_ARGUMENT: cache.fork()}, **ANSWER)
    other = copy.deepcopy(qwen)
    cache = protokv.Cache(other, 24)
    other.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="attention of the model was changed"):
        watch(other, cache, texts(1))


def test_the_state_of_another_model_is_refused(qwen: Any, tmp_path: Path) -> None:
    cache = protokv.Cache(qwen, 24)
    path = tmp_path / "state.safetensors"
    watch(qwen, cache, texts(2))
    cache.save(path)
    other = copy.deepcopy(qwen)
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    with pytest.raises(StateMismatch, match="weights_digest"):
        protokv.Cache.load(path, other)
    with pytest.raises(StateMismatch, match="config_hash"):
        protokv.load(path, "protokv/mini")
