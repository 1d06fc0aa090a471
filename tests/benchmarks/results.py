"""Measure two calls in turn, and write tables of results.

A busy machine slows both calls, so the median of their ratios holds.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def paired(
    device: torch.device, ours: Callable[[], object], other: Callable[[], object], rounds: int
) -> dict[str, Any]:
    """Return the median milliseconds of both calls and the median of their ratios.

    On a CPU the process's own time counts, elsewhere the clock.
    """
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def milliseconds(call: Callable[[], object]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (clock() - start)

    ours(), other()
    pairs = [(milliseconds(ours), milliseconds(other)) for _ in range(rounds)]
    return {
        "ms": round(median(a for a, _ in pairs), 3),
        "other_ms": round(median(b for _, b in pairs), 3),
        "ratio": round(median(a / b for a, b in pairs if b), 3) if any(b for _, b in pairs) else None,
        "rounds": rounds,
    }


def write_table(name: str, device: str, rows: list[dict[str, Any]], note: str) -> None:
    """Write `results/NAME-DEVICE.json` and `.md`."""
    about = machine(device)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}-{device}"
    file.with_suffix(".json").write_text(json.dumps({"machine": about, "note": note, "rows": rows}, indent=1) + "\n")
    lines = [
        ", ".join(f"{key} {value}" for key, value in about.items()) + ".",
        "",
        note,
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
        *("| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows),
    ]
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")


def machine(device: str) -> dict[str, Any]:
    """Return what the figures depend on, without a name of the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    )
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.machine(),
        "cores": len(models) or torch.get_num_threads(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    } | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})
