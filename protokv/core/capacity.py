"""Check that a memory fits its devices before it is allocated. A state of a few bytes can claim any budget.

A full state takes the bytes of its declaration, and in use about as much again for attention. A memory larger than the
whole device is refused at once. One that is larger than the free part is refused when an allocation fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from protokv.core.tensors import TensorSpec
from protokv.errors import ConfigError
from protokv.machine import is_out_of_memory, memory_bytes


class DoesNotFit(ConfigError):
    """A memory of this budget is larger than the device or its free part."""


def check_capacity(specs: Iterable[TensorSpec], devices: Iterable[torch.device], budget: int) -> None:
    """Refuse a memory that is larger than its devices together.

    Raises:
        DoesNotFit: naming both sizes.
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
    """Turn an allocation failure into DoesNotFit; other errors pass.

    Raises:
        DoesNotFit: a tensor could not be allocated.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFit(
            f"budget: {budget} tokens of this model take more memory than is free",
            hint="choose a smaller budget, or free memory",
        ) from error


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a device, used and free; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes()
