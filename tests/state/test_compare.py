"""Two states compared: every difference is found, in header and tensors, and nothing else."""

from dataclasses import replace

import pytest
import torch

from protokv.state.describe import compare_states
from tests.state.conftest import make


def test_a_flipped_bit_anywhere_is_one_differing_element() -> None:
    state = make()
    assert compare_states(state, make()) == {
        "equal": True,
        "tensors_compared": 8,
        "header": [],
        "tensors": [],
    }
    for name, tensor in state.tensors.items():
        if tensor.numel() and tensor.dtype != torch.bool:
            changed = tensor.clone()
            changed.reshape(-1).view(torch.uint8)[-1] ^= 1
            (found,) = compare_states(
                state, replace(state, tensors={**state.tensors, name: changed})
            )["tensors"]
            assert (found["name"], found["differing"], found["elements"]) == (
                name,
                1,
                changed.numel(),
            )


@pytest.mark.parametrize(
    ("a", "b", "differing", "distance"),
    [
        ([1.0, 2.0, 3.0, 4.0], [1.0, 2.5, 3.0, 0.0], 2, 4.0),
        ([1.0, 2.0], [float("nan"), 2.5], 2, None),
        ([0.0], [-0.0], 1, 0.0),
    ],
)
def test_the_largest_distance_is_told_if_it_is_finite(
    a: list[float], b: list[float], differing: int, distance: float | None
) -> None:
    (found,) = compare_states(*(make(tensors={"a": torch.tensor(one)}) for one in (a, b)))[
        "tensors"
    ]
    assert (found["elements"], found["differing"], found["max_abs_difference"]) == (
        len(a),
        differing,
        distance,
    )


def test_what_differs_in_form_or_is_on_one_side_is_told_with_both_values() -> None:
    state = make(tensors={"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)})
    other = replace(
        state,
        tensors={
            "a": torch.zeros(3, 2),
            "b": torch.zeros(4, dtype=torch.int32),
            "d": torch.zeros(1),
        },
        clock=replace(state.clock, steps=6),
        memory={**state.memory, "split": [0.5, 0.25], "more": {"x": True}},
        settings={"seed": False},
        source=None,
    )
    found = compare_states(state, other)
    assert {one["name"]: (one["a"], one["b"], one["differing"]) for one in found["tensors"]} == {
        "a": ("float32 [2, 3]", "float32 [3, 2]", None),
        "b": ("float32 [4]", "int32 [4]", None),
        "c": ("float32 [1]", None, None),
        "d": (None, "float32 [1]", None),
    }
    header = {one["field"]: (one["a"], one["b"]) for one in found["header"]}
    assert header["clock.steps"] == (5, 6)
    assert header["memory.split[1]"] == (0.5, 0.25)
    assert header["memory.more.x"] == (None, True)
    assert header["settings.seed"] == (0, False)
    assert header["source.size_bytes"] == (123, None)
