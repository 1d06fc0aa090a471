"""`generate` with a question of `protokv.Cache`, in every mode in which transformers forwards.

It answers as over the whole text, or one line refuses it; asking changes nothing.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import protokv
from protokv.errors import ConfigError
from protokv.texts import Keywords
from tests.backbones.texts import texts, watch
from tests.core.streams import copy_of, same
from tests.stream.test_held import ANSWER, make

# Modes that forward in another way; how a token is chosen among logits is transformers' own.
MODES: dict[str, Keywords] = {
    "greedy": {},
    "sample": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 9, "min_p": 0.01},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 2},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "guidance": {"guidance_scale": 1.5},
    "prefill in chunks": {"prefill_chunk_size": 2},
    "another assistant": {"assistant_model": make("Llama", num_hidden_layers=1)},
    "an equal assistant": {"assistant_model": make("Llama")},
}
REFUSED: dict[str, tuple[Keywords, str]] = {
    "beams": ({"num_beams": 2}, "one stream"),
    "beam sample": ({"num_beams": 2, "do_sample": True}, "one stream"),
    "several sequences": ({"do_sample": True, "num_return_sequences": 2}, "one stream"),
    "no cache": ({"use_cache": False}, "use_cache"),
    # transformers itself refuses another cache beside ours.
    "static": ({"cache_implementation": "static"}, "Passing both"),
    "dynamic": ({"cache_implementation": "dynamic"}, "Passing both"),
    "quantized": ({"cache_implementation": "quantized"}, "Passing both"),
}
Setup = tuple[Any, protokv.Cache, Tensor, Tensor]


@pytest.fixture(scope="module")
def made() -> Setup:
    model = make("Llama")
    cache = protokv.Cache(model, 400, center_bits=32)
    steps = texts(6)
    watch(model, cache, steps)
    (question,) = texts(1, 6, seed=77)
    return model, cache, question, torch.cat((*steps, question), 1)


@pytest.fixture
def setup(made: Setup) -> Iterator[Setup]:
    """Hold that a test leaves the stream as it was."""
    before = copy_of(made[1].stream)
    yield made
    assert same(copy_of(made[1].stream), before)


def answer(model: Any, inputs: Keywords, mode: Keywords) -> list[int]:
    torch.manual_seed(0)
    found = model.generate(**inputs, **ANSWER | mode)
    return getattr(found, "sequences", found)[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("mode", list(MODES))
def test_an_answer_is_that_of_the_whole_text_in_every_mode(setup: Setup, mode: str) -> None:
    model, cache, question, whole = setup
    expected = answer(model, {"input_ids": whole}, MODES[mode])
    for _ in range(2):
        assert answer(model, cache.question({"input_ids": question}), MODES[mode]) == expected


@pytest.mark.parametrize("mode", list(REFUSED))
def test_a_mode_that_no_memory_serves_is_refused_and_leaves_nothing(
    setup: Setup, mode: str
) -> None:
    model, cache, question, _ = setup
    refused, said = REFUSED[mode]
    with pytest.raises((ConfigError, ValueError), match=said):
        answer(model, cache.question({"input_ids": question}), refused)
