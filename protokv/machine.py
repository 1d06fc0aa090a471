"""The main memory of this machine or of the container, the errors of too little of it, and the
beginning of a process of a pool.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import threading
from pathlib import Path
from typing import Any

# The limit of a container and what it uses (control groups, version 2).
_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
_MEMINFO = Path("/proc/meminfo")

# Messages of allocators, the loader of libraries and threads.
_NO_ROOM = re.compile(
    "can't allocate|not enough memory|cannot allocate memory|out of memory|failed to map segment"
    "|can't start new thread|unable to mmap",
    re.IGNORECASE,
)


def measure_machine_memory() -> int | None:
    """Return the bytes of main memory that this process may have, used or free; None if the system
    does not tell.
    """
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        return min(size, int(_CONTAINER.read_text()))
    except (OSError, ValueError):
        return size


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or what it came from, tells that there was no memory, or no thread,
    to have.
    """
    told: BaseException | None = error
    while told is not None:
        # Found by its name, because torch may not be imported yet.
        if isinstance(told, MemoryError) or type(told).__name__ == "OutOfMemoryError":
            return True
        if getattr(told, "errno", None) == errno.ENOMEM or _NO_ROOM.search(str(told)):
            return True
        told = told.__cause__ or told.__context__
    return False


def measure_free_memory() -> int | None:
    """Return the bytes of main memory that a new program can use; None if the system does not
    tell.
    """
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
        free = int(found[1]) * 1024 if found else None
    except (OSError, ValueError):
        free = None
    try:
        # Pages of files count as used in a container, and are given up on demand; so this is at
        # most what is free.
        left = int(_CONTAINER.read_text()) - int(_USED.read_text())
    except (OSError, ValueError):
        return free
    return left if free is None else min(free, left)


inherited: list[Any] = []
"""What a process of a pool got at its start: shared memory can be given at no other time."""


def begin_pool_process(*shared: Any) -> None:
    """Begin a process of a pool: let it end with the one that started it, and keep what is shared.

    This room imports nothing heavy, so that the process ends also while it imports the others.
    """
    inherited[:] = shared
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            # A state has its last commit.
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
