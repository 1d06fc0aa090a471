"""Time a new process until a model's weights are on a device: `python -m tests.benchmarks.loading
MODEL DEVICE WAY`.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

# As `load_backbone` does; by threads that each move some; by transformers, which has threads of its
# own (accelerate).
WAYS = ("one by one", "four threads", "device map")


def measure(folder: str, device: str, way: str) -> dict[str, float]:
    """Return the seconds of each stage."""
    moments = {"start": time.perf_counter()}
    import torch

    moments["torch_s"] = time.perf_counter()
    torch.zeros(1, device=device).sum().item()
    moments["device_s"] = time.perf_counter()
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

    from protokv.backbones import adapter, loading  # noqa: F401 - imports what all families need

    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(AutoConfig.from_pretrained(folder))]
    moments["transformers_s"] = time.perf_counter()
    first = "cpu" if way == WAYS[1] else device
    placed = device if way == WAYS[2] else None
    model = loading.load_model(
        kind, folder, loading.Placement(torch.bfloat16, torch.device(first), placed)
    )
    weights = [*model.parameters(), *model.buffers()]
    with ThreadPoolExecutor(4) as pool:
        for one, moved in zip(
            weights, pool.map(lambda one: one.data.to(device), weights), strict=True
        ):
            one.data = moved
    if device == "cuda":
        torch.cuda.synchronize()
    moments["weights_s"] = time.perf_counter()
    return {name: round(moments[name] - moments[last], 3) for last, name in pairwise(moments)}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
