"""Packing leaves out what is unused, loses nothing, and is the same for the same state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.core.packing import check_tensor_shapes, restore_unused_slots, trim_unused_slots
from protokv.core.tensors import TensorSpec
from protokv.errors import StateCorrupt

SPECS = (
    TensorSpec("a.x", ("layer", "prototype", "feature"), (2, 7, 3), torch.float32, ""),
    TensorSpec("a.y", ("prototype",), (7,), torch.int64, "", fill=-1),
    TensorSpec("b.z", ("near_token",), (5,), torch.bool, "", fill=True),
    TensorSpec("c.grows", ("near_token", "feature"), (None, 3), torch.bfloat16, ""),
)


@given(
    used=st.tuples(*[st.integers(0, 7)] * 2, st.integers(0, 5), st.integers(0, 4)), data=st.data()
)
def test_what_is_unpacked_is_what_was_packed_bit_for_bit(
    used: tuple[int, ...], data: st.DataObject
) -> None:
    tensors = {spec.name: spec.allocate(torch.device("cpu")) for spec in SPECS}
    tensors["c.grows"] = torch.zeros(used[3], 3, dtype=torch.bfloat16)
    value = data.draw(st.sampled_from([-0.0, 1.0, float("nan"), -1e-45]))
    if used[0]:
        tensors["a.x"][data.draw(st.integers(0, 1)), used[0] - 1, data.draw(st.integers(0, 2))] = (
            value
        )
    if used[1]:
        tensors["a.y"][used[1] - 1] = 0
    if used[2]:
        tensors["b.z"][used[2] - 1] = False
    packed = trim_unused_slots(tensors, SPECS)
    assert packed["a.x"].shape == (2, max(used[:2]), 3)
    assert packed["a.y"].shape == (max(used[:2]),)
    assert packed["b.z"].shape == (used[2],)
    assert all(tensor.is_contiguous() for tensor in packed.values())
    again = restore_unused_slots(packed, SPECS)
    for name, tensor in tensors.items():
        assert tensor.shape == again[name].shape
        assert tensor.view(torch.uint8).tolist() == again[name].view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("name", "shape"),
    [("a.x", (2, 8, 3)), ("a.x", (1, 7, 3)), ("a.x", (2, 6, 3)), ("a.x", (2, 7, 2)), ("b.z", (6,))],
)
def test_only_slots_may_be_left_out_and_of_all_tensors_alike(
    name: str, shape: tuple[int, ...]
) -> None:
    tensors = {spec.name: spec.allocate(torch.device("cpu")) for spec in SPECS}
    tensors["c.grows"] = torch.zeros(5, 3, dtype=torch.bfloat16)
    check_tensor_shapes(tensors, SPECS)
    tensors[name] = torch.zeros(shape, dtype=tensors[name].dtype)
    with pytest.raises(StateCorrupt, match=name.replace(".", r"\.") + "|a.y"):
        check_tensor_shapes(tensors, SPECS)
