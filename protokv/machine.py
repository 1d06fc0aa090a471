"""The main memory of this machine, or of the container."""

from __future__ import annotations

import os
import re
from pathlib import Path

# The limit of a container and what it uses (control groups, version 2).
_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
_MEMINFO = Path("/proc/meminfo")


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


def free_memory_bytes() -> int | None:
    """Return the bytes of main memory that a new program can use; None if the system does not tell."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
        free = int(found[1]) * 1024 if found else None
    except (OSError, ValueError):
        free = None
    try:
        # Pages of files count as used in a container, and are given up on demand; so this is at most what is free.
        left = int(_CONTAINER.read_text()) - int(_USED.read_text())
    except (OSError, ValueError):
        return free
    return left if free is None else min(free, left)
