"""Layers of one input as one product: what they give, and what a model holds, stays as it was."""

from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Linear, ModuleDict

from protokv.backbones import load_backbone
from protokv.backbones.projections import join_projections
from tests.counting import Counting
from tests.tolerance import near

SIZES = {"q_proj": 5, "k_proj": 3, "v_proj": 1}


def make_layers() -> Any:
    return ModuleDict({name: Linear(7, SIZES[name]) for name in SIZES}).requires_grad_(False)


def move_one(layers: Any) -> Any:
    layers.v_proj.double().float().bias.add_(1)
    return layers


@given(
    change=st.sampled_from([ModuleDict.eval, ModuleDict.double, deepcopy, move_one]),
    calls=st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.booleans()), min_size=9),
)
def test_layers_give_what_they_give_apart_in_any_order_whatever_is_done_to_them(
    change: Any, calls: list[Any]
) -> None:
    apart = make_layers()
    joined = deepcopy(apart)
    join_projections(joined)
    pair = [change(layers) for layers in (apart, joined)]
    for layers in pair:
        layers.k_proj.weight.add_(1)
    inputs = torch.randn(2, 3, 7).to(apart.q_proj.weight).unbind()
    for name, second in calls:
        expected, found = (layers[name](inputs[second]) for layers in pair)
        torch.testing.assert_close(found, expected, **near(expected, 7, 20.0))


def test_an_input_is_let_go_when_the_last_layer_has_read_it() -> None:
    layers = make_layers()
    join_projections(layers)
    x = torch.ones(7)
    held = ref(x)
    for layer in layers.values():
        layer(x)
    del x
    assert held() is None


def test_a_layer_that_is_trained_gets_its_gradient() -> None:
    layers = make_layers()
    join_projections(layers)
    layers.requires_grad_(True)
    layers.k_proj(torch.ones(7)).sum().backward()
    assert layers.k_proj.weight.grad is not None


class Own(Linear):
    pass


HOOKED = Linear(7, 3)
HOOKED.forward = HOOKED.forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "other", [Own(7, 3), HOOKED, Linear(6, 3), Linear(7, 3, bias=False), Linear(7, 3).half()]
)
def test_layers_of_which_one_is_another_kind_are_left_alone(other: Linear) -> None:
    layers = make_layers()
    layers["k_proj"] = other
    join_projections(layers)
    assert "forward" not in vars(layers.q_proj)


def test_each_joined_product_is_one_operation_and_no_copy_comes(folder: Path) -> None:
    text = load_backbone(str(folder), device="cpu")._text  # type: ignore[attr-defined]

    def count() -> int:
        with Counting() as counting:
            text(torch.ones(1, 5).long(), use_cache=False)
        return counting.operations.total()

    before = count()
    join_projections(text)
    joined = [one.forward.func for one in text.modules() if "forward" in vars(one)]
    assert before - count() == len(joined) - len(set(joined)) > 0
