"""Two states compared: every difference is found, in header and tensors, and nothing else."""

from dataclasses import replace

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


def test_the_largest_distance_is_told_if_it_is_finite() -> None:
    nan = float("nan")
    ours = {"far": [1.0, 2.0, 3.0], "none": [1.0, 2.0], "zero": [0.0]}
    theirs = {"far": [1.0, 2.5, 0.0], "none": [nan, 2.5], "zero": [-0.0]}
    each = ({name: torch.tensor(one) for name, one in side.items()} for side in (ours, theirs))
    found = compare_states(*(make(tensors=one) for one in each))["tensors"]
    assert {one["name"]: (one["differing"], one["max_abs_difference"]) for one in found} == {
        "far": (2, 3.0),
        "none": (2, None),
        "zero": (1, 0.0),
    }


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
