"""The main memory of this machine, or of the container."""

from __future__ import annotations

import os
from pathlib import Path

# The limit of a container (control groups, version 2).
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int | None:
    """Return the bytes of main memory, used or free; None if the system does not tell."""
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        return min(size, int(_CONTAINER.read_text()))
    except (OSError, ValueError):
        return size
