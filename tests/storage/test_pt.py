"""The `.pt` form: what torch reads, and what no pickle can make it do."""

from __future__ import annotations

import torch

from protokv.storage.api import save_state
from tests.storage.form_tests import LocalFormTests


class TestPt(LocalFormTests):
    suffix = ".pt"

    def test_torch_reads_the_file_and_its_tensors_stand_alone(self, at, make_state):
        state, path = make_state(), at()
        save_state(state, path)
        found = torch.load(path, weights_only=True)
        assert set(found) == {"protokv", "tensors"}
        assert all(found["tensors"][name].equal(tensor) for name, tensor in state.tensors.items())
