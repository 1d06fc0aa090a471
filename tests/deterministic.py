"""Every test of memories runs on deterministic kernels, with poisoned allocations."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_that_is_not_written_holds_nan() -> Iterator[None]:
    """Fill the memory of `torch.empty` with NaN, and let a nondeterministic kernel raise."""
    # `use_deterministic_algorithms` does the same, and imports torch's compiler for it.
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")
