"""The peak of this process's memory, as the kernel counts it since the program began.

`getrusage` is no help in a child: a process starts with the peak of the one that started it, and a
test run is large.
"""

import re
import resource
from pathlib import Path


def peak_kib() -> int:
    """KiB that were resident at most; where there is no `/proc`, with the parent's peak as a
    floor.
    """
    status = Path("/proc/self/status")
    found = (
        re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if status.exists()
        else None
    )
    return int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
