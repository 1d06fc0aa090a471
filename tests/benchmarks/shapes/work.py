"""Arithmetic on a model's shape: the roofline of each stage, and the bytes of a full state.

The roofline counts products and everything that must be read and written once: weights, slots, centres, the sketch of a
plan. It leaves out activations and elementwise passes, so the share of the peak that is reached is a lower bound. A
stage whose work depends on the video has no figure. `measure_peak` measures the two peaks of a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from protokv.core.tensors import TensorSpec
from protokv.memories import CONFIGS, DurableConfig, MemoryConfig
from protokv.memories.durable.blocked import Schedule
from protokv.memories.durable.nearest import PIVOTS, SketchTables, rows_of, width_of
from tests.benchmarks.shapes.models import QUESTION, Shape

RING_ONLY = ("sliding-window", "last-frames")


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations (a product and a sum are two) and bytes of device memory."""

    flop: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Peak:
    """Measured peaks: FLOP a second in one product, bytes a second in one copy (read and written)."""

    flop_s: float
    bytes_s: float

    def least_ms(self, work: Work) -> float:
        return 1000 * max(work.flop / self.flop_s, work.bytes / self.bytes_s)


def measure_peak(device: torch.device, dtype: torch.dtype, side: int, nbytes: int, rounds: int = 5) -> Peak:
    """Return the best of some rounds of a square product and of a copy."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def best_s(call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(max(time.perf_counter() - start, 1e-9))
        return min(seconds[1:])

    return Peak(2 * side**3 / best_s(lambda: torch.mm(a, b)), 2 * nbytes / best_s(lambda: target.copy_(source)))


def work_of(shape: Shape, config: MemoryConfig, slots: int, dtype: torch.dtype) -> dict[str, Work]:
    """Return the work of each stage that has a fixed amount; attention reads `slots` slots of the memory."""
    T, width = shape.tokens, dtype.itemsize
    head = shape.text["hidden_size"] * shape.text["vocab_size"]
    read = _forward(shape, QUESTION, slots, width)
    token = _forward(shape, 1, slots + QUESTION, width)
    return {
        "forward": _forward(shape, T, slots, width),
        "first token": Work(read.flop + 2 * QUESTION * head, read.bytes + head * width),
        "per token": Work(token.flop + 2 * head, token.bytes + head * width),
        **_update(shape, config, width),
    }


def _forward(shape: Shape, queries: int, slots: int, width: int) -> Work:
    text, L, D = shape.text, shape.layers, shape.head_size
    E, heads, kv_heads = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    weights = 2 * E * heads * D + 2 * E * kv_heads * D + 3 * E * text["intermediate_size"]
    attention = 4 * queries * heads * D * (slots + (queries + 1) / 2)
    read = weights * width + kv_heads * slots * (2 * D * width + 4)
    return Work(L * (2 * queries * weights + attention), L * read)


def vision_work(shape: Shape, width: int) -> Work:
    """Return the work of the vision tower and its projection into the language model for one step."""
    vision, layers = shape.vision, shape.vision_layers
    E, inner = vision["hidden_size"], vision["intermediate_size"]
    side, frames = shape.frame
    text = shape.text["hidden_size"]
    patches = (side // 14) ** 2
    if shape.kind == "LlavaOnevision":
        weights = 4 * E * E + 2 * E * inner
        seen, joined = layers * patches, E * text + text * text
        after, embedded = patches * joined, 3 * 14 * 14 * E
    else:
        weights = 4 * E * E + 3 * E * inner
        whole = len(vision["fullatt_block_indexes"])
        window = (vision["window_size"] // 14) ** 2
        seen, joined = whole * patches + (layers - whole) * min(window, patches), 16 * E * E + 4 * E * text
        after, embedded = patches // 4 * joined, 3 * 14 * 14 * frames * E
    flop = 2 * patches * (layers * weights + embedded) + 4 * patches * E * seen + 2 * after
    return Work(flop, width * (layers * weights + joined + embedded))


def _update(shape: Shape, config: MemoryConfig, width: int) -> dict[str, Work]:
    """Return the work of an update, for memories whose update is fixed work."""
    B, D, T = shape.layers * shape.text["num_key_value_heads"], shape.head_size, shape.tokens
    # A step is written to the ring; memories with more than a ring copy out the tokens that leave it.
    ring = B * T * 2 * D * width
    if config.name in RING_ONLY:
        return {"update": Work(0, 2 * ring)}
    if not (isinstance(config, DurableConfig) and config.is_blocked):
        return {}
    K = config.prototypes
    planning = _planning_heads(K, B, T)
    F, rows = SketchTables.of(D, torch.device("cpu")).size, rows_of(K)
    # A look at the pivots, and two at blocks of an order; the sketch, of bytes, is written once and read thrice.
    flop = 2 * rows * F * (PIVOTS + 2 * width_of(K))
    plan = Work(planning * flop, planning * (K * 2 * D * 4 + rows * F * 4))
    # A merge reads the centres of both prototypes, and writes one of them and the token.
    merge = Work(B * T * 2 * D * 3, 4 * ring + B * T * 2 * D * 4 * 4)
    return {
        "update": Work(plan.flop + merge.flop, plan.bytes + merge.bytes),
        "update: plan": plan,
        "update: merge": merge,
        # At most two prototypes a token have changed.
        "context": Work(0, B * 2 * T * 2 * D * (4 + width)),
    }


def _planning_heads(prototypes: int, heads: int, tokens: int, steps: int = 60) -> float:
    """Return how many heads plan in a step, in the mean of many steps of a full bank."""
    schedule = Schedule(prototypes, heads, filled=prototypes)
    planned = 0
    for step in range(2 * steps):
        for piece in schedule.parts_of(tokens):
            n = piece.stop - piece.start
            turn = schedule.next_turn(n, tokens)
            if turn is not None and step >= steps:
                planned += len(range(*turn.indices(heads)))
            schedule.carry_out(n)
    return planned / steps


def state_bytes(shape: Shape, budgets: Iterable[int], dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """Return a row for each memory and budget: MB of a full state, and kB of one more token where nothing bounds it."""
    rows = []
    for budget in budgets:
        for name, settings in CONFIGS.items():
            cls = settings.memory
            specs = cls.declare(MemoryConfig.of(name, budget=budget), shape.memory(dtype))
            growing = [spec for spec in specs if None in spec.shape]
            more = 0.0 if cls.bounded else _token_bytes(growing, shape.tokens) / 1e3
            mb = round(sum(spec.nbytes for spec in specs) / 1e6, 1)
            rows.append({"memory": name, "budget": budget, "mb": mb, "kb_a_token_more": round(more, 1)})
    return rows


def _token_bytes(specs: Iterable[TensorSpec], tokens: int) -> float:
    """Return the bytes of one token on an axis that grows by tokens, or by steps of `tokens` tokens."""
    return sum(
        replace(spec, shape=tuple(size or 1 for size in spec.shape)).nbytes
        / (1 if "token" in spec.dims[spec.shape.index(None)] else tokens)
        for spec in specs
    )
