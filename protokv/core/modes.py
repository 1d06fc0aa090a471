"""The modes of torch in which a memory is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Record no gradients, and make tensors that may be written to in any mode in which a user's
    model runs.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
