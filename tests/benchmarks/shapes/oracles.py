"""Correctness first: a memory must equal its literal form before a figure of it is shown.

Runs the property tests that compare a memory with its literal form on a CPU, in this process, and compares attention by
the device's kernels with its plain form. `tests/test_gpu.py` compares memories on a GPU with those on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from protokv.core.attention import attend
from protokv.core.context import Segment
from tests.benchmarks.shapes.models import Shape
from tests.oracles import attention as plain

ROOT = Path(__file__).parents[3]
_ATTENTION = "core/test_attention.py::test_the_fused_form_is_the_plain_one"
_RING = "core/test_near.py::test_every_token_is_in_the_window_or_has_left_it_once_in_order"
_PAPER = "memories/paper/test_oracle.py::test_the_fast_memory_equals_the_algorithms_written_out"
ORACLES = {
    "durable": (
        "durable/test_agglomerative.py::test_the_fast_bank_equals_merging_written_out",
        "durable/test_blocked.py::test_the_rule_equals_the_rule_written_out_bit_for_bit",
    ),
    "paper": (_PAPER,),
    "continuity": (_PAPER,),
    "hermes": ("baselines/test_hermes.py::test_it_equals_its_oracle_token_for_token",),
    "infinipot-v": ("baselines/test_infinipot_v.py::test_it_equals_its_oracle_token_for_token",),
    "rekv": ("baselines/test_rekv.py::test_every_layer_reads_what_a_literal_loop_over_blocks_chooses",),
    "dycoke": (
        _RING,
        "baselines/test_dycoke.py::test_merging_frame_by_frame_across_a_saved_state_is_merging_the_whole_video",
    ),
    "dycoke-decode": (_RING, "baselines/test_dycoke.py::test_decode_steps_read_what_a_literal_computation_chooses"),
    "last-frames": ("baselines/test_last_frames.py::test_the_last_whole_steps_that_fit_are_read_and_nothing_else",),
    "sliding-window": (_RING,),
    "full": (_RING,),
}
"""Tests by memory; paths begin in `tests`."""


class _Outcomes:
    """A plugin of pytest that collects the tests that passed and the others."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[0].removeprefix("tests/")
        if not report.passed:
            self.failed.add(name)
        elif report.when == "call":
            self.passed.add(name)


def proven(memories: Sequence[str]) -> dict[str, bool]:
    """Return for each memory whether it and attention equal their literal forms on this CPU."""
    wanted = sorted({_ATTENTION, *(test for name in memories for test in ORACLES[name])})
    outcomes = _Outcomes()
    arguments = ["-q", "--no-header", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    pytest.main([*arguments, *(str(ROOT / "tests" / test) for test in wanted)], plugins=[outcomes])
    good = outcomes.passed - outcomes.failed
    return {name: {_ATTENTION, *ORACLES[name]} <= good for name in memories}


@torch.inference_mode()
def attention_error(shape: Shape, slots: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest difference of one layer's attention on this device to the plain form in float32."""
    H, D = shape.text["num_key_value_heads"], shape.head_size
    heads, T = shape.text["num_attention_heads"], shape.tokens
    g = torch.Generator().manual_seed(0)
    query, keys, values, *tail = (
        torch.randn(size, generator=g).to(device, dtype)
        for size in ((heads, T, D), (H, slots, D), (H, slots, D), (H, T, D), (H, T, D))
    )
    segment = Segment(keys, values, torch.randint(1, 400, (H, slots), generator=g).float().log().to(device))
    given = query, [segment], (tail[0], tail[1]), D**-0.5
    return float((attend(*given).float() - plain.attend(*given).float()).abs().max())
