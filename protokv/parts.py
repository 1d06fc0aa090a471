"""How much is done at once. What is done gives the same result whichever it is; knows nothing of what that is."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def cut(rows: int, at_once: int, device: torch.device) -> Iterator[slice]:
    """Slices that make up `rows`: on a CPU of `at_once` each, at least one, so that what is made of them stays in its
    cache until it is used; on any other device a single one."""
    step = max(1, at_once if device.type == "cpu" else rows)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
