"""The roofline by arithmetic: the bytes and floating-point operations that each stage cannot do without.

Counted are products and what must be read and written once: weights, slots, centres, the sketch of a plan. Left out are
activations and elementwise passes, so the share of the peak that is reached is a lower bound. Where a stage's work
depends on what happens in the video there is no figure. Measures the two peaks of a device too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protokv.config import DurableConfig, MemoryConfig
from protokv.durable.blocked import Schedule, pieces_of
from protokv.durable.nearest import PIVOTS, SketchTables, rows_of, width_of
from tests.benchmarks.shapes.models import QUESTION, Shape
from tests.benchmarks.shapes.timing import Stopwatch

RING_ONLY = ("sliding-window", "last-frames")


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations (a product and a sum are two) and bytes of device memory."""

    flop: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Peak:
    """What a device was seen to do: FLOP a second in one product, bytes a second in one copy (read and written)."""

    flop_s: float
    bytes_s: float

    def least_ms(self, work: Work) -> float:
        return 1000 * max(work.flop / self.flop_s, work.bytes / self.bytes_s)


def measure_peak(device: torch.device, dtype: torch.dtype, side: int, nbytes: int, rounds: int = 5) -> Peak:
    """The best of some rounds of a square product and of a copy."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    stopwatch = Stopwatch(device)
    for turn in range(rounds + 1):
        stopwatch.time("product", torch.mm, a, b)
        stopwatch.time("copy", target.copy_, source)
        stopwatch.end_round(count=turn > 0)
    product, copy = (min(stopwatch.times[name]) / 1000 for name in ("product", "copy"))
    return Peak(2 * side**3 / max(product, 1e-9), 2 * nbytes / max(copy, 1e-9))


def work_of(shape: Shape, config: MemoryConfig, slots: int, dtype: torch.dtype) -> dict[str, Work]:
    """Of each stage that has a fixed amount of it; `slots` is N, what attention reads of the memory."""
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
    """Of the vision tower and of what joins it to the language model, for one step."""
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
    """Of memories whose update is fixed work."""
    B, D, T = shape.layers * shape.text["num_key_value_heads"], shape.head_size, shape.tokens
    # A step is written to the ring; for all but a ring, what leaves is copied out.
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
    # Centres of what goes and of what it goes into are read, the second and the token are written.
    merge = Work(B * T * 2 * D * 3, 4 * ring + B * T * 2 * D * 4 * 4)
    return {
        "update": Work(plan.flop + merge.flop, plan.bytes + merge.bytes),
        "update: plan": plan,
        "update: merge": merge,
        # At most two prototypes a token have changed.
        "context": Work(0, B * 2 * T * 2 * D * (4 + width)),
    }


def _planning_heads(prototypes: int, heads: int, tokens: int, steps: int = 60) -> float:
    """How many heads plan in a step, in the mean of many steps of a full bank."""
    schedule = Schedule(prototypes, heads, filled=prototypes)
    planned = 0
    for step in range(2 * steps):
        for piece in pieces_of(tokens, schedule.merges):
            n = piece.stop - piece.start
            turn = schedule.next_turn(n)
            if turn is not None and step >= steps:
                planned += len(range(*turn.indices(heads)))
            schedule.carry_out(n)
    return planned / steps
