"""Two states compared: every difference is found, in header and tensors, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from protokv.state.describe import compare
from tests.state.conftest import make as make_state


def with_tensor(state, name, tensor):
    return replace(state, tensors={**state.tensors, name: tensor})


def test_a_flipped_bit_anywhere_is_one_differing_element():
    state = make_state()
    assert compare(state, make_state()) == {"equal": True, "tensors_compared": 8, "header": [], "tensors": []}
    for name, tensor in state.tensors.items():
        if tensor.numel() and tensor.dtype != torch.bool:
            changed = tensor.clone()
            changed.reshape(-1).view(torch.uint8)[-1] ^= 1
            (found,) = compare(state, with_tensor(state, name, changed))["tensors"]
            assert (found["name"], found["differing"], found["elements"]) == (name, 1, changed.numel())


@pytest.mark.parametrize(
    ("a", "b", "differing", "distance"),
    [
        ([1.0, 2.0, 3.0, 4.0], [1.0, 2.5, 3.0, 0.0], 2, 4.0),
        ([1.0, 2.0], [float("nan"), 2.5], 2, None),
        ([1.0, 2.0], [float("inf"), 2.5], 2, None),
        ([0.0], [-0.0], 1, 0.0),
    ],
)
def test_the_largest_distance_is_told_if_it_is_finite(a, b, differing, distance):
    state = make_state(tensors={"a": torch.tensor(a)})
    (found,) = compare(state, with_tensor(state, "a", torch.tensor(b)))["tensors"]
    assert (found["elements"], found["differing"], found["max_abs_difference"]) == (len(a), differing, distance)


def test_tensors_of_other_shape_or_dtype_and_those_of_one_side_are_told():
    state = make_state(tensors={"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)})
    other = make_state(tensors={"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.int32), "d": torch.zeros(1)})
    found = {one["name"]: (one["a"], one["b"], one["differing"]) for one in compare(state, other)["tensors"]}
    assert found == {
        "a": ("float32 [2, 3]", "float32 [3, 2]", None),
        "b": ("float32 [4]", "int32 [4]", None),
        "c": ("float32 [1]", None, None),
        "d": (None, "float32 [1]", None),
    }


def test_every_field_of_the_header_that_differs_is_told_with_both_values():
    state = make_state()
    other = replace(
        state,
        clock=replace(state.clock, steps=6),
        memory={**state.memory, "split": [0.5, 0.25], "more": {"x": True}},
        settings={"seed": False},
        source=None,
    )
    found = {one["field"]: (one["a"], one["b"]) for one in compare(state, other)["header"]}
    assert found["clock.steps"] == (5, 6)
    assert found["memory.split[1]"] == (0.5, 0.25)
    assert found["memory.more.x"] == (None, True)
    assert found["settings.seed"] == (0, False)
    assert found["source.size_bytes"] == (123, None)
    assert compare(other, other)["equal"]
