"""The forms of a single file: `.safetensors` and `.pt`."""

from __future__ import annotations

import json

import torch
from safetensors import safe_open

from protokv.state.api import save_state
from tests.state.form_tests import LocalFormTests


class TestSafetensors(LocalFormTests):
    suffix = ".safetensors"

    def test_the_safetensors_library_reads_the_file(self, at, make_state):
        state, path = make_state(), at()
        save_state(state, path)
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(state.tensors)
            assert all(file.get_tensor(name).equal(tensor) for name, tensor in state.tensors.items())
            assert list(file.metadata()) == ["protokv"]
            assert json.loads(file.metadata()["protokv"])["header"]["clock"]["steps"] == 5


class TestPt(LocalFormTests):
    suffix = ".pt"

    def test_torch_reads_the_file_and_its_tensors_stand_alone(self, at, make_state):
        state, path = make_state(), at()
        save_state(state, path)
        found = torch.load(path, weights_only=True)
        assert set(found) == {"protokv", "tensors"}
        assert all(found["tensors"][name].equal(tensor) for name, tensor in state.tensors.items())
