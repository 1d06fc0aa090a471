"""Where results are, and what they depend on."""

import platform
from pathlib import Path

import torch

from protokv.texts import JsonObject

RESULTS = Path(__file__).parent / "results"


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
