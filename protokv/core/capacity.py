"""Whether a memory fits a device: asked before anything is allocated, because a few bytes can claim any budget.

A state that is full takes what its declaration says, and while it is in use about as much again for what attention
reads. What is larger than the whole device is refused at once; what is merely too large for what is free is refused
when the device says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from protokv.core.tensors import TensorSpec
from protokv.errors import ConfigError
from protokv.machine import memory_bytes


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
    return memory_bytes()
