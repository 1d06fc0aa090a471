"""Who computes on a CPU: compiled loops, or the tensor operations that serve everywhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protokv.memory.protokv import loops


@pytest.fixture(scope="module", params=["loops", "tensors"])
def computed_by(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tensors":
            patch.setattr(loops, "serve", lambda _: False)
        yield request.param
