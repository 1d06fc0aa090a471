"""The `.safetensors` form."""

from __future__ import annotations

import json
from dataclasses import replace

from safetensors import safe_open

from protokv.storage.api import load_state, save_state
from tests.storage.form_tests import LocalFormTests


class TestSafetensors(LocalFormTests):
    suffix = ".safetensors"

    def test_the_same_state_gives_the_same_bytes_in_whatever_order_it_was_put_together(self, at, make_state):
        state, (a, b, c) = make_state(), (at(), at(), at())
        turned = replace(
            state,
            tensors=dict(reversed(list(state.tensors.items()))),
            memory=dict(reversed(list(state.memory.items()))),
        )
        save_state(state, a)
        save_state(turned, b)
        save_state(load_state(a), c)
        assert a.read_bytes() == b.read_bytes() == c.read_bytes()

    def test_the_safetensors_library_reads_the_file(self, at, make_state):
        state, path = make_state(), at()
        save_state(state, path)
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(state.tensors)
            assert all(file.get_tensor(name).equal(tensor) for name, tensor in state.tensors.items())
            assert list(file.metadata()) == ["protokv"]
            assert json.loads(file.metadata()["protokv"])["header"]["clock"]["steps"] == 5
