"""Two things measured in turn, so that a busy machine slows both: their medians, and the median of the ratios."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from tests.benchmarks.conftest import RESULTS, _machine


def paired(
    device: torch.device, ours: Callable[[], object], other: Callable[[], object], rounds: int
) -> dict[str, Any]:
    """Milliseconds of both and their ratio, by the process's own time on a CPU and by the clock elsewhere."""
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
    """`results/NAME-DEVICE.json` and `.md`."""
    machine = _machine(device)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}-{device}"
    file.with_suffix(".json").write_text(json.dumps({"machine": machine, "note": note, "rows": rows}, indent=1) + "\n")
    lines = [
        ", ".join(f"{key} {value}" for key, value in machine.items()) + ".",
        "",
        note,
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
        *("| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows),
    ]
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")
