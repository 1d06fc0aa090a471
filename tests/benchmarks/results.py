"""Tables of results, and what they depend on."""

import json
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from protokv.texts import JsonObject

RESULTS = Path(__file__).parent / "results"


def table(rows: Sequence[JsonObject]) -> str:
    """Return rows as Markdown in columns that line up."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        columns,
        *(["" if row.get(name) is None else str(row[name]) for name in columns] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells)


def write_table(name: str, device: str, rows: list[JsonObject], note: str) -> None:
    """Write `results/NAME-DEVICE.json` and `.md`."""
    file = RESULTS / f"{name}-{device}"
    here = machine(device)
    document = {"machine": here, "note": note, "rows": rows}
    file.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    about = ", ".join(f"{key} {value}" for key, value in here.items())
    file.with_suffix(".md").write_text(f"{about}.\n\n{note}\n\n{table(rows)}\n")


def machine(device: str) -> JsonObject:
    """Return what the figures depend on, without a name of the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.machine(),
        "cores": len(models) or torch.get_num_threads(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    } | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})
