"""What a step costs on a CPU at real size, and its parts: `python -m tests.realsize.cost`.

Builds whole published models with random weights (`build`), fills the memory with noisy copies of
one step's keys and values, and watches a few steps more on one thread. Writes
`tests/benchmarks/results/realsize-cpu.*`.
"""

import argparse
import gc
import shutil
import time
from itertools import product
from pathlib import Path
from statistics import fmean

import av
import torch
from torch import Tensor

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.step import StepTokens
from protokv.memories import MemoryConfig
from protokv.stream.session import Session
from protokv.stream.taking import forward_steps
from protokv.texts import JsonObject
from tests.benchmarks.results import write_table
from tests.realsize.build import CACHE, build

MODELS = ("SmolVLM2-500M-Video-Instruct", "llava-onevision-qwen2-0.5b-ov-hf")
CLIP = Path(__file__).parents[2] / "samples/short/video.mp4"
NOTE = (
    "CPU milliseconds of a step of one frame on one thread, budget full, means. `forward` is the "
    "language model, with "
    "what the memory shows it, and `memory` is the memory behind it. `beside_percent`: the share "
    "of what is neither "
    "vision tower nor forward. `minute_s`: CPU seconds of a watched minute at the model's own rate."
)


def fill(session: Session, keys: Tensor, values: Tensor, count: int, tokens: StepTokens) -> None:
    """Append so many steps, whose keys and values are those of one step with noise."""
    drift = [0.3 * part.std() * torch.randn_like(part) for part in (keys, values)]
    for i in range(count):
        placed = session.position_steps(
            [tokens], [session.clock.steps * session.clock.step_seconds]
        )
        own_keys = keys + drift[0].roll(i, 2)
        own_values = values + drift[1].roll(i, 2)
        session.commit(placed, own_keys, own_values, session.cache.fork())


@torch.inference_mode()
def cost(backbone: Backbone, memory: str, budget: int, steps: int) -> JsonObject:
    """Return means of the parts of a step."""
    session = Session.start(backbone, MemoryConfig.of(memory, budget=budget))
    began = time.process_time()
    with av.open(str(CLIP)) as video:
        rate = float(video.streams.video[0].average_rate or 1)
        images = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    every = round(rate / backbone.default_fps)
    decode = 1000 * (time.process_time() - began) / len(images) * every
    spent: dict[str, list[float]] = {}

    def lap(part: str) -> None:
        nonlocal began
        now = time.process_time()
        spent.setdefault(part, []).append(1000 * (now - began))
        began = now

    for i in range(steps + 1):
        start_s = session.clock.steps * session.clock.step_seconds
        began = time.process_time()
        prepared = backbone.prepare(images[i * every % len(images)][None])
        lap("preprocess")
        (tokens,) = backbone.embed_steps([prepared], [start_s])
        lap("vision")
        placed = session.position_steps([tokens], [start_s])
        (forwarded,) = forward_steps({session: placed})
        lap("forward")
        session.commit(placed, *forwarded)
        lap("memory")
        if not i:
            fill(session, *forwarded[:2], budget // len(tokens) + 4, tokens)
            spent.clear()
    for _ in range(2):
        began = time.process_time()
        session.ask("What is shown?", Decoding(1))
        first_token = 1000 * (time.process_time() - began)
    found = {"decode": decode} | {part: fmean(each) for part, each in spent.items()}
    whole = sum(found.values())
    beside = whole - found["vision"] - found["forward"]
    return {
        "memory_kind": memory,
        "budget": budget,
        "step_tokens": len(tokens),
        **{part: round(ms, 1) for part, ms in found.items()},
        "beside_percent": round(100 * beside / whole, 1),
        "minute_s": round(60 * whole / 1000 / session.clock.step_seconds),
        "first_token": round(first_token, 1),
        "held_mb": round(sum(session.memory.nbytes().values()) / 1e6, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--memories", nargs="+", default=["durable"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[1000, 6000])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows: list[JsonObject] = []
    for name in chosen.models:
        folder = CACHE / "models" / f"{name}-cost"
        if not folder.is_dir():
            build(name, folder, whole=True)
            gc.collect()
        backbone = load_backbone(str(folder), device="cpu")
        for memory, budget in product(chosen.memories, chosen.budgets):
            rows.append(
                {"model": name, "dtype": str(backbone.dtype)[6:]}
                | cost(backbone, memory, budget, steps=5)
            )
            print(rows[-1], flush=True)
        del backbone
        shutil.rmtree(folder)
    write_table("realsize", "cpu", rows, NOTE)
