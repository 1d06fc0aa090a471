"""The benchmarks of single parts run at small sizes, and what they compare is equal."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.benchmarks.attention import compare
from tests.benchmarks.decode import WAYS, measure
from tests.benchmarks.snapshot_cost import measured, tensors_of


def test_attention_equals_its_oracle_and_every_size_has_a_row() -> None:
    assert len(compare(torch.device("cpu"), unit=12, tokens=9, head_size=16, rounds=1)) == 8


def test_every_way_of_decoding_reads_the_same(tmp_path: Path) -> None:
    assert len(measure(tmp_path, frames=60, width=128, height=96, gops=(15,), rounds=1)) == len(WAYS)


def test_every_form_is_saved_and_loaded(tmp_path: Path) -> None:
    assert len(measured(tensors_of(2, 1), tmp_path, 1)) == 9
