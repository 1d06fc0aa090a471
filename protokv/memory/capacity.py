"""Whether a memory fits a device: asked before anything is allocated, because a few bytes can claim any budget.

A state that is full takes what its declaration says, and while it is in use about as much again for what attention
reads. What is larger than the whole device is refused at once; what is merely too large for what is free is refused
when the device says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from protokv.errors import ConfigError
from protokv.memory.state import TensorSpec

# Of a container, where there is one (control groups, version 2).
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


class DoesNotFit(ConfigError):
    """A memory of this budget is larger than the device, or than what is free of it."""


def check_capacity(specs: Iterable[TensorSpec], devices: Iterable[torch.device], budget: int) -> None:
    """Refuse a memory that these devices cannot hold together.

    Raises:
        DoesNotFit: naming its bytes and theirs.
    """
    sizes = [device_bytes(device) for device in dict.fromkeys(devices)]
    there = sum(size for size in sizes if size is not None)
    wanted = sum(spec.nbytes for spec in specs)
    if None not in sizes and wanted > there:
        raise DoesNotFit(
            f"budget: {budget} tokens of this model take {wanted / 2**30:.1f} GiB, "
            f"and the device has {there / 2**30:.1f} GiB",
            hint="choose a smaller budget",
        )


@contextmanager
def allocating(budget: int) -> Iterator[None]:
    """Tell a device that has no room from a fault of the program.

    Raises:
        DoesNotFit: something could not be allocated.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # The allocator of the CPU has no exception of its own.
        if not (isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)):
            raise
        raise DoesNotFit(
            f"budget: {budget} tokens of this model take more memory than is free",
            hint="choose a smaller budget, or free memory",
        ) from error


def device_bytes(device: torch.device) -> int | None:
    """Memory of a device, in use or not; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        return min(size, int(_CONTAINER.read_text()))
    except (OSError, ValueError):
        return size
