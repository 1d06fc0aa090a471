"""With a model that somebody holds a memory is right, or it is refused in one line before anything
is forwarded.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import protokv
from protokv.backbones.loading import digest_model_parameters
from protokv.backbones.stream_cache import CACHE_ARGUMENT
from protokv.core.step import StepKV
from protokv.errors import ConfigError
from protokv.memories import MemoryConfig
from protokv.texts import Keywords
from tests.backbones.texts import texts, watch
from tests.core.streams import copy_of, same

BASE: Keywords = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
ANSWER: Keywords = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}


def make(name: str, *, config: str = "Config", head: str = "ForCausalLM", **settings: Any) -> Any:
    whole = getattr(transformers, name + config)(**BASE | settings)
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(whole).eval()
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(0.25 * torch.randn(weight.shape, generator=g))
    return model


@torch.no_grad()
def ask(model: Any, cache: protokv.Cache, ids: Tensor) -> Tensor:
    found: Tensor = model(**cache.question({"input_ids": ids})).logits[0]
    return found


@pytest.fixture(scope="module")
def llama() -> Any:
    return make("Llama")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SmolLM3", {"no_rope_layers": [0] * 4, "use_sliding_window": False}),
        ("Exaone4", MIXED),
        ("Cohere2", MIXED),
    ],
    ids=str,
)
def test_tokens_said_again_merge_into_what_they_are_where_no_layer_rotates(
    name: str, settings: Keywords
) -> None:
    """Six words again and again take few places: the memory stands for the full cache."""
    model = make(name, **settings)
    steps = texts(12, words=6)
    cache = protokv.Cache(model, 70, center_bits=32)
    watch(model, cache, steps)
    plain = DynamicCache(config=model.config)
    (question,) = texts(1, seed=2)
    with torch.no_grad():
        for ids in steps:
            model(input_ids=ids, **{CACHE_ARGUMENT: plain})
        theirs = model(input_ids=question, **{CACHE_ARGUMENT: plain}).logits[0].log_softmax(-1)
    ours = ask(model, cache, question).log_softmax(-1)
    assert float((theirs.exp() * (theirs - ours)).sum(-1).mean()) < 0.01


def test_layers_that_do_not_rotate_hold_keys_as_they_are_beside_layers_that_do() -> None:
    model = make("SmolLM3", no_rope_layers=[1, 0, 0, 1], use_sliding_window=False)
    cache = protokv.Cache(model, 24, center_bits=32)
    watch(model, cache, texts(1))
    assert cache.decoder.rotated == [True, False, False, True]
    memory = cache.memory
    assert memory is not None
    one = torch.randn(4, 2, 1, 16, generator=torch.Generator().manual_seed(3))
    for step in range(1, 12):
        line = torch.arange(10 * step, 10 * step + 10)[:, None]
        keys = one.expand(-1, -1, 10, -1).contiguous()
        memory.append(StepKV(keys, keys, line, torch.full((10, 2), 0.5), step))
    for layer in range(4):
        (part,) = memory.context().at(layer, torch.empty(0))
        heaviest = part.keys[0, part.bias[0].argmax()]
        assert torch.allclose(heaviest, one[layer, 0, 0], atol=1e-4) == (layer in (1, 2))


# Keys are lengthened along with their angles.
LONGER: Keywords = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
BY_PAIRS: Keywords = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ANGLES: dict[str, tuple[str, Keywords]] = {
    "yarn": ("Llama", {"rope_parameters": {**LONGER, "rope_type": "yarn"}}),
    "longrope": ("Llama", {"rope_parameters": {**LONGER, **BY_PAIRS, "rope_type": "longrope"}}),
    # An angle for each pair, and its sine first.
    "pairs": ("GPTJ", {"n_embd": 64, "n_head": 4, "n_layer": 3, "rotary_dim": 8}),
}


@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("memory", ["durable", "infinipot-v", "paper"])
def test_angles_are_those_of_the_model(angles: str, memory: str) -> None:
    name, settings = ANGLES[angles]
    model = make(name, **settings)
    if not model._supports_attention_backend:
        pytest.skip("the attention of GPT-J is its own before transformers 5.24")
    steps = texts(12)
    exact = {"center_bits": 32} if memory == "durable" else {}
    budget = 4000 if memory == "paper" else 400  # of which a quarter is not merged
    cache = protokv.Cache(model, memory=MemoryConfig.of(memory, budget=budget, **exact))
    watch(model, cache, steps)
    (question,) = texts(1, seed=2)
    with torch.no_grad():
        expected = model(torch.cat((*steps, question), 1)).logits[0, -10:]
    torch.testing.assert_close(ask(model, cache, question), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Gemma2", {"head_dim": 16, "layer_types": ["full_attention"] * 4}, "softcap"),
        ("GraniteSWA", {"layer_types": ["full_attention"] * 4}, "s_aux"),
        ("JetMoe", {"kv_channels": 16}, "changes its keys"),
        ("DiffLlama", {}, "changes its values"),
        ("Doge", {}, "mask for each head"),
        ("Bloom", {"n_head": 4, "n_layer": 3}, "cannot be set"),
        ("Gemma", {"head_dim": 16, "use_bidirectional_attention": True}, "see later ones"),
        ("Bart", {"head": "ForConditionalGeneration"}, "reads an encoder as well"),
        ("Llama4", {"config": "TextConfig", "head_dim": 16, "num_local_experts": 2}, "complex"),
    ],
)
def test_a_model_that_no_memory_serves_is_refused_before_a_token_is(
    name: str, settings: Keywords, said: str
) -> None:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("this version of transformers has no such family")
    with pytest.raises(ConfigError, match=said):
        protokv.Cache(make(name, **settings))


@pytest.mark.parametrize("kind", [AssertionError, ImportError, KeyError, NotImplementedError])
def test_whatever_a_model_raises_at_its_first_token_is_one_line(llama: Any, kind: Any) -> None:
    model = copy.deepcopy(llama)
    model.set_attn_implementation("eager")
    no_kernel = Mock(side_effect=kind("there is no kernel\nof this size"))
    model.model.layers[1].mlp.register_forward_hook(no_kernel)
    with pytest.raises(ConfigError, match="there is no kernel") as told:
        protokv.Cache(model)
    assert "\n" not in told.value.message
    assert model.config._attn_implementation == "eager"


@contextmanager
def failing(module: Any) -> Iterator[None]:
    hook = module.register_forward_hook(Mock(side_effect=RuntimeError("no memory left")))
    try:
        with pytest.raises(RuntimeError, match="no memory left"):
            yield
    finally:
        hook.remove()


PLACES = ["model.layers.0.mlp", "model.layers.2.self_attn", "model.layers.3", "lm_head"]


@pytest.mark.parametrize("settings", [("Llama", {}), ("Exaone4", MIXED)], ids=lambda own: own[0])
@pytest.mark.parametrize("place", PLACES)
def test_a_forward_that_fails_leaves_nothing(settings: tuple[str, Any], place: str) -> None:
    model = make(settings[0], **settings[1])
    steps, (question,) = texts(12), texts(1, seed=2)
    cache, clean = protokv.Cache(model, 48), protokv.Cache(model, 48)
    watch(model, clean, steps)
    watch(model, cache, steps[:6])
    with failing(model.get_submodule(place)), torch.no_grad():
        model(**cache.step({"input_ids": steps[6]}))
    with pytest.raises(ConfigError, match="the last forward failed"):
        cache.commit()
    with failing(model.get_submodule(place)), torch.no_grad():
        model(**cache.question({"input_ids": question}))
    watch(model, cache, steps[6:])
    assert torch.equal(ask(model, cache, question), ask(model, clean, question))
    assert same(copy_of(cache.stream), copy_of(clean.stream))


def test_a_copied_model_notes_each_token_once(llama: Any) -> None:
    steps, (question,) = texts(8), texts(1, seed=2)
    cache = protokv.Cache(llama, 24)
    watch(llama, cache, steps)
    other = copy.deepcopy(llama)
    again = protokv.Cache(other, 24)
    watch(other, again, steps)
    assert torch.equal(ask(other, again, question), ask(llama, cache, question))


def test_a_question_is_asked_once_and_tokens_are_not_hidden(llama: Any) -> None:
    cache = protokv.Cache(llama, 24)
    (ids,) = texts(1)
    watch(llama, cache, texts(8))
    question = cache.question({"input_ids": ids})
    before = copy_of(cache.stream)
    llama.generate(**question, **ANSWER)
    with pytest.raises(ConfigError, match="this question was asked"):
        llama.generate(**question, **ANSWER)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    for call in (cache.step, cache.question):
        with pytest.raises(ConfigError, match="hides tokens"):
            call({"input_ids": ids, "attention_mask": padded})
    assert same(copy_of(cache.stream), before)


def test_training_is_refused_and_a_gradient_is_not_lost_without_a_word(llama: Any) -> None:
    model = copy.deepcopy(llama)
    cache = protokv.Cache(model, 24)
    (ids,) = texts(1)
    with pytest.raises(ConfigError, match="trained through a memory"):
        model(**cache.step({"input_ids": ids})).logits.sum().backward()
    model.train()
    for use in (lambda: protokv.Cache(model), lambda: watch(model, cache, [ids])):
        with pytest.raises(ConfigError, match="being trained"):
            use()


def test_an_answer_reads_the_memory_where_a_model_was_published_without_a_cache(llama: Any) -> None:
    model = copy.deepcopy(llama)
    cache = protokv.Cache(model, 24)
    (ids,) = texts(1)
    watch(model, cache, texts(8))
    expected = model.generate(**cache.question({"input_ids": ids}), **ANSWER)
    model.generation_config.use_cache = False
    assert torch.equal(model.generate(**cache.question({"input_ids": ids}), **ANSWER), expected)


def test_a_forgotten_commit_is_told(llama: Any) -> None:
    cache = protokv.Cache(llama, 24)
    steps = [{"input_ids": ids} for ids in texts(4)]
    with torch.no_grad():
        for step in steps[:3]:
            llama(**cache.step(step))
    with pytest.raises(ConfigError, match="wait for a commit"):
        cache.step(steps[3])
    with pytest.raises(ConfigError, match="has input_ids"):
        cache.question({"inputs_embeds": torch.zeros(1, 1, 64)})


def check_identity(model: torch.nn.Module, same: Callable[[], Any], *others: Any) -> None:
    """A model is itself after one change, and another model after each of the others."""
    before = digest_model_parameters(model)
    same()
    assert digest_model_parameters(model) == before
    for change in others:
        change()
        assert digest_model_parameters(model) != before


class Adapted(torch.nn.Linear):
    """A layer with two adapters, as peft has it."""

    active_adapters = "a"
    disabled = False

    @property
    def disable_adapters(self) -> bool:
        return self.disabled


def test_another_adapter_or_none_makes_another_model() -> None:
    layer = Adapted(64, 48)
    other = partial(setattr, layer, "active_adapters", "b")
    none = partial(setattr, layer, "disabled", True)
    check_identity(layer, list, other, none)


def test_integers_in_a_buffer_as_quantizers_leave_them_are_of_the_model() -> None:
    layer = torch.nn.Module()
    integers = torch.arange(48 * 64).view(48, 64).to(torch.int8)
    layer.register_buffer("integers", integers)
    check_identity(layer, list, partial(integers[0, 0].add_, 1))


class Packed(torch.nn.Parameter):
    """A weight of two codes of four bits a byte, as bitsandbytes has it: it is no float, and its
    kind does not say of what it consists.
    """


def test_packed_codes_are_of_the_model_in_any_order_within_32_rows() -> None:
    layer = torch.nn.Linear(64, 48, bias=False)
    codes = torch.randint(0, 256, (48 * 64 // 2, 1), dtype=torch.uint8)
    layer.weight = Packed(codes, requires_grad=False)
    block = codes[: 32 * 64 // 2]

    def reorder() -> None:
        halves = torch.cat((block >> 4, block & 15))[torch.randperm(32 * 64)]
        block.copy_((halves[::2] << 4) | halves[1::2])

    check_identity(layer, reorder, partial(block[7].bitwise_xor_, 1))


def test_a_memory_that_failed_within_a_step_is_of_no_use(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = protokv.Cache(llama, 24)
    (ids,) = texts(1)
    watch(llama, cache, texts(4))
    no_memory = Mock(side_effect=RuntimeError("no memory left"))
    monkeypatch.setattr(cache.memory, "append", no_memory)
    with pytest.raises(RuntimeError, match="no memory left"):
        watch(llama, cache, [ids])
    for use in (lambda: watch(llama, cache, [ids]), lambda: cache.save(tmp_path / "x.safetensors")):
        with pytest.raises(ConfigError, match="of no use"):
            use()
