"""The table of published models: what their weights take, and which ones fit."""

from __future__ import annotations

import re

import pytest

from protokv.backbones.sizes import DTYPES_OF_WEIGHTS, KNOWN_MODELS, models_that_fit

GB = 10**9


def test_fewer_bits_take_fewer_bytes_and_quantisation_leaves_the_embeddings_at_16_bits() -> None:
    for model in KNOWN_MODELS:
        sizes = [model.weight_bytes(dtype) for dtype in DTYPES_OF_WEIGHTS]
        assert sizes == sorted(sizes, reverse=True)
        assert model.weight_bytes("float16") == 2 * model.parameters
        assert model.weight_bytes("8bit") == model.parameters + model.embeddings
        assert model.needed_bytes("4bit") > model.weight_bytes("4bit")


def test_the_name_of_a_model_says_its_size_without_the_tower() -> None:
    """A name rounds, and many count the language model alone; the rest is less than a billion and a half."""
    for model in KNOWN_MODELS:
        found = re.search(r"-([0-9.]+)([bm])", model.name.lower())
        assert found, model.name
        stated = float(found[1]) / (1 if found[2] == "b" else 1000)
        assert 0.9 * stated < model.parameters / GB < stated + 1.5, model.name


@pytest.mark.parametrize(
    ("free_gb", "dtype", "largest"),
    [
        (2.5, "bfloat16", "SmolVLM2-500M"),
        (4, "bfloat16", "InternVL3_5-1B"),
        (9, "4bit", "Qwen3-VL-8B"),
        (24, "bfloat16", "Qwen3-VL-8B"),
    ],
)
def test_models_that_fit_are_those_up_to_a_size(free_gb: float, dtype: str, largest: str) -> None:
    fitting = models_that_fit(int(free_gb * GB), dtype)
    assert largest in fitting[-1].name
    assert [model.parameters for model in fitting] == sorted(model.parameters for model in fitting)
    assert all(model.needed_bytes(dtype) <= free_gb * GB for model in fitting)
    assert all(model.needed_bytes(dtype) > free_gb * GB for model in KNOWN_MODELS if model not in fitting)


def test_nothing_fits_into_nothing() -> None:
    assert models_that_fit(0) == []
