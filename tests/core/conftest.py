"""Who computes on a CPU: compiled loops, or the tensor operations that serve everywhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from protokv.core import loops


@pytest.fixture(scope="module", params=["loops", "tensors"])
def computed_by(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "LEAST", 0 if request.param == "loops" else 10**9)
        assert loops.serve(torch.zeros(1)) == (request.param == "loops")
        yield request.param
