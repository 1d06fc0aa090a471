"""How much memory this machine has, that of its container where it runs in one. Knows nothing of what takes it."""

from __future__ import annotations

import os
from pathlib import Path

# Of a container, where there is one (control groups, version 2).
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int | None:
    """Bytes of main memory, in use or not; None where the system does not say."""
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        return min(size, int(_CONTAINER.read_text()))
    except (OSError, ValueError):
        return size
