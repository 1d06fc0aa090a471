"""One memory under one model: every stage of some steps, some questions and a commit, each by a stopwatch.

The memory is filled with noise at the level of tensors first, so it is full when the model watches. A step is timed
whole and in parts: what stands behind a colon is a part of what stands before it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from protokv import storage
from protokv.backbones.base import Backbone
from protokv.config import MemoryConfig
from protokv.core.decoding import Decoding
from protokv.core.prototypes import ProtoKV
from protokv.core.session import Session
from protokv.core.step import StepKV, StepTokens
from protokv.durable.blocked import BlockedRule
from protokv.storage.checkpoint import to_state
from protokv.video import open_source, read_steps
from tests.benchmarks.shapes.models import Shape, frames_of
from tests.benchmarks.shapes.timing import Stopwatch

# Steps after the memory is full, so that every prototype has been in question.
_MORE = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """Attributes: `stopwatch`, all times; `parts`, bytes the memory holds by part; `slots`, N, of which `visible` are
    shown; `tokens`, how many were seen."""

    stopwatch: Stopwatch
    parts: dict[str, int]
    slots: int
    visible: int
    tokens: int


@torch.inference_mode()
def fill(session: Session, shape: Shape, steps: int) -> None:
    """Steps of noise past the model."""
    backbone, memory, T = session.backbone, session.memory, shape.tokens
    first = backbone.embed_step(frames_of(shape, 0))
    side = int(T**0.5)
    cells = (torch.arange(side, device=backbone.device) + 0.5) / side
    coordinates = torch.cartesian_prod(cells, cells).flip(1)
    g = torch.Generator(backbone.device).manual_seed(0)
    size = (backbone.layers, backbone.kv_heads, T, backbone.head_size)
    for _ in range(steps):
        clock = session.clock
        start_s = clock.steps * clock.step_seconds
        stands = backbone.step_positions(
            first, origin=len(backbone.prefix_ids), start=clock.next_position, index=clock.steps, time_s=start_s
        )
        keys, values = (
            torch.randn(size, generator=g, device=backbone.device).to(backbone.dtype) for _ in ("keys", "values")
        )
        memory.select(first.embeddings, first.grid)
        memory.append(StepKV(keys, values, stands.positions, coordinates, clock.steps))
        session.clock = replace(
            clock,
            steps=clock.steps + 1,
            stream_time_s=start_s + clock.step_seconds,
            next_position=max(clock.next_position, max(stands.highest) + 1),
            tokens_seen=clock.tokens_seen + T,
        )


@torch.inference_mode()
def see(backbone: Backbone, shape: Shape, rounds: int) -> tuple[Stopwatch, list[StepTokens]]:
    """Preprocessing and vision tower, the same for every memory; and the steps that came of it."""
    stopwatch, steps = Stopwatch(backbone.device), []

    def one(turn: int) -> None:
        prepared = stopwatch.time("preprocess", backbone.prepare, frames_of(shape, turn))
        steps.extend(stopwatch.time("vision tower", backbone.embed_steps, [prepared], [float(turn)]))

    _rounds(stopwatch, one, rounds)
    return stopwatch, steps


def measure(
    backbone: Backbone,
    shape: Shape,
    config: MemoryConfig,
    steps: Sequence[StepTokens],
    rounds: int,
    stream: float = 1.25,
) -> Measured:
    """Every stage behind the vision tower.

    Args:
        backbone: of `models.build`.
        shape: its own.
        config: of the memory.
        steps: of `see`; more than rounds.
        rounds: steps, questions' tokens and commits that are timed, after one of each that is not.
        stream: tokens seen before, as a multiple of those that fill the memory; of the budget where nothing bounds it.
    """
    session = Session.start(backbone, config)
    room = config.near_tokens + config.prototypes if config.prototypes else config.budget
    fill(session, shape, int(stream * room) // shape.tokens + _MORE)
    stopwatch = Stopwatch(backbone.device)
    with _Watched(session, stopwatch) as stages:

        def step(turn: int) -> None:
            start_s = session.clock.steps * session.clock.step_seconds
            stopwatch.time("step behind the tower", session.take, [steps[turn]], [start_s])
            for stage in stages:
                stopwatch.none_in_this_round(stage)

        _rounds(stopwatch, step, rounds)
    _merge_is_the_rest(stopwatch)

    def question(_: int) -> None:
        pieces = session.stream("what?", Decoding(2))
        stopwatch.time("first token", next, pieces)
        stopwatch.time("per token", next, pieces)
        pieces.close()

    _rounds(stopwatch, question, rounds)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds + 1):
            path = Path(folder) / f"{turn}.safetensors"
            stopwatch.time("commit", lambda path=path: storage.save_state(to_state(session), path), by_clock=True)
            path.unlink()
            stopwatch.end_round(count=turn > 0)
    with torch.inference_mode():
        context = session.memory.context()
        keys: Any = getattr(context, "keys", None)
        visible = context.visible_tokens()
    slots = visible if keys is None else keys.shape[2]
    return Measured(stopwatch, session.memory.nbytes(), slots, visible, session.clock.tokens_seen)


def _rounds(stopwatch: Stopwatch, one: Callable[[int], None], rounds: int) -> None:
    """A round that warms up and tells the peaks, and those that are timed."""
    stopwatch.peaks_of(lambda: one(0))
    stopwatch.end_round(count=False)
    for turn in range(1, rounds + 1):
        one(turn)
        stopwatch.end_round()


class _Watched:
    """Within it, the parts of a step are timed; the session is as before afterwards."""

    def __init__(self, session: Session, stopwatch: Stopwatch) -> None:
        self._parts: list[tuple[Any, str, str]] = [
            (session.backbone, "forward", "forward"),
            (session.memory, "append", "update"),
            (session.memory, "context", "context"),
        ]
        policy = session.memory._policy if isinstance(session.memory, ProtoKV) else None
        if isinstance(policy, BlockedRule):
            self._parts.append((policy, "_plan", "update: plan"))
        self._stopwatch = stopwatch

    def __enter__(self) -> list[str]:
        for owner, name, stage in self._parts:
            self._stopwatch.wrap(owner, name, stage)
        return [stage for _, _, stage in self._parts]

    def __exit__(self, *_: object) -> None:
        for owner, name, _ in self._parts:
            delattr(owner, name)


def _merge_is_the_rest(stopwatch: Stopwatch) -> None:
    """Of an update with plans, what is not planning. A step that did not plan has planned for no time."""
    times, planned = stopwatch.times["update"], stopwatch.times.get("update: plan")
    if planned:
        stopwatch.times["update: merge"] = [whole - plan for whole, plan in zip(times, planned, strict=True)]


def decode(path: Path, fps: float, frames: int, rounds: int, device: torch.device) -> Stopwatch:
    """A file's first steps, read one after the other."""
    stopwatch = Stopwatch(device)
    with open_source(path) as source:
        steps: Iterator[Any] = iter(read_steps(source, fps, frames))
        for turn in range(rounds + 1):
            stopwatch.time("decode", next, steps)
            stopwatch.end_round(count=turn > 0)
    return stopwatch
