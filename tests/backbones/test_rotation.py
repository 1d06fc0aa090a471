"""Rotation in fewer operations gives what a model's own function gives, in that model alone."""

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.backbones import load_backbone
from protokv.backbones.rotation import speed_rotation
from tests.backbones.tiny import BUILDERS
from tests.counting import Counting
from tests.tolerance import near

# The others rotate parts of keys, or queries and keys apart.
ROTATED = sorted(BUILDERS.keys() - {"gemma4", "qwen3_5", "qwen3_5_moe"})


def load_text(family: str, path: Path) -> Any:
    backbone: Any = load_backbone(str(BUILDERS[family](path)), device="cpu")
    return backbone._text


def find_layers(text: Any) -> list[Any]:
    return [one for one in text.modules() if "forward" in vars(one)]


@pytest.fixture(scope="module")
def rotate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return transformers' function, and the one in its place."""
    text = load_text("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    speed_rotation(text)
    (layer, *_) = find_layers(text)
    theirs = sys.modules[type(layer).__module__].apply_rotary_pos_emb
    return theirs, layer.forward.__func__.__globals__["apply_rotary_pos_emb"]


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.integers(1, 9)),
    turned=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_queries_and_keys_are_rotated_as_by_the_function_of_a_model(
    rotate: tuple[Any, Any], sizes: tuple[int, ...], turned: int, seed: int
) -> None:
    B, H, T, half = sizes
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, 2 * half, generator=generator)

    q, k = draw(B, H, T), draw(B, 1, T)
    cos, sin = draw(B, T), draw(B, T)
    if turned == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    theirs, ours = rotate
    for _ in range(2):
        for expected, found in zip(
            theirs(q, k, cos, sin, turned), ours(q, k, cos, sin, turned), strict=True
        ):
            torch.testing.assert_close(found, expected, **near(expected, 2, 9.0))


def test_what_is_rotated_in_part_goes_to_the_function_of_the_model(
    rotate: tuple[Any, Any],
) -> None:
    theirs, ours = rotate
    q = torch.randn(1, 2, 3, 8).half()
    angles = torch.randn(1, 3, 8)
    for expected, found in zip(
        theirs(q, q, angles, angles), ours(q, q, angles, angles), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ROTATED)
def test_a_layer_has_four_operations_less_and_other_models_stay(
    family: str, tmp_path: Path
) -> None:
    text = load_text(family, tmp_path)
    other = deepcopy(text)
    ids = torch.arange(5)[None]

    def count(model: Any) -> tuple[int, Tensor]:
        with torch.no_grad(), Counting() as counting:
            hidden = model(ids, use_cache=False).last_hidden_state
        return counting.operations.total(), hidden

    before, expected = count(text)
    speed_rotation(text)
    after, found = count(text)
    layers = find_layers(text)
    # The signs of the sines are made once: two operations.
    assert before - after == 4 * len(layers) - 2 > 0
    torch.testing.assert_close(found, expected, **near(expected, 64, 20.0))
    assert find_layers(other) == []
    assert count(other)[0] == before


def test_layers_that_rotate_otherwise_or_were_replaced_are_left_alone(tmp_path: Path) -> None:
    text = load_text("gemma4", tmp_path / "gemma4")
    speed_rotation(text)
    assert find_layers(text) == []
    text = load_text("qwen3_vl", tmp_path / "qwen3_vl")
    replaced = {one: one.forward for one in text.modules()}
    for one, forward in replaced.items():
        one.forward = forward
    speed_rotation(text)
    assert all(one.forward is forward for one, forward in replaced.items())
