"""Every test of memories runs on deterministic kernels, with poisoned allocations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_that_is_not_written_holds_nan() -> Iterator[None]:
    """Whatever reads `torch.empty` before it is written reads NaN, and a nondeterministic kernel raises."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
