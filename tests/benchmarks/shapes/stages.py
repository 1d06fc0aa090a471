"""One memory under one model: time every stage of some steps, some questions and a commit.

The memory is filled with noise at the level of tensors first, so it is full when the model watches. A step is timed
whole and in parts: a name behind a colon is a part of the stage before the colon.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.prototypes import PrototypeMemory
from protokv.core.session import Session
from protokv.core.step import StepKV, StepTokens
from protokv.memories import MemoryConfig
from protokv.memories.durable.blocked import BlockedRule
from protokv.state.checkpoint import to_state
from protokv.state.writer import save_state
from protokv.video import open_source, read_steps
from tests.benchmarks.shapes.models import Shape, frames_of

# Tokens seen, as a multiple of those that fill a memory (of the budget where nothing bounds it). More steps follow, so
# that every prototype has been in question.
_STREAM, _MORE = 1.25, 5


class Stopwatch:
    """Adds up the milliseconds of each stage, and the peak bytes that torch allocates in it on CUDA.

    On CUDA it takes events on the stream, with the device idle before each call: a stage pays for its own launches
    alone. On a CPU it takes the time of the process, which a busy machine disturbs less than the wall clock.

    Attributes:
        times: milliseconds by stage, one number a round.
        peaks: bytes by stage above those that were held before it; only on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._round: dict[str, float] = defaultdict(float)
        # The most bytes that were allocated since each open stage began, outermost first.
        self._open: list[int] = []
        self.times: dict[str, list[float]] = defaultdict(list)
        self.peaks: dict[str, int] = defaultdict(int)

    def time(self, stage: str, call: Callable[..., Any], *args: Any, by_clock: bool = False, **kwargs: Any) -> Any:
        """Call, and add its time to the stage; several calls in a round are one number."""
        if self._device.type == "cuda":
            return self._on_cuda(stage, call, *args, **kwargs)
        clock = time.perf_counter if by_clock else time.process_time
        start = clock()
        try:
            return call(*args, **kwargs)
        finally:
            self._round[stage] += 1000 * (clock() - start)

    def _on_cuda(self, stage: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        self._fold_peak()
        held = torch.cuda.memory_allocated(self._device)
        self._open.append(held)
        start.record()
        try:
            return call(*args, **kwargs)
        finally:
            end.record()
            torch.cuda.synchronize(self._device)
            self._round[stage] += start.elapsed_time(end)
            self._fold_peak()
            self.peaks[stage] = max(self.peaks[stage], self._open.pop() - held)

    def _fold_peak(self) -> None:
        """Let a stage within a stage count for both."""
        most = torch.cuda.max_memory_allocated(self._device)
        self._open = [max(peak, most) for peak in self._open]
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def parts(self, methods: Sequence[tuple[Any, str, str]]) -> Iterator[None]:
        """Time methods of single objects, given as (owner, name, stage), wherever they are called from."""
        for owner, name, stage in methods:
            call = getattr(owner, name)
            setattr(owner, name, lambda *a, call=call, stage=stage, **k: self.time(stage, call, *a, **k))
        try:
            yield
        finally:
            for owner, name, _ in methods:
                delattr(owner, name)

    def rounds(self, one: Callable[[int], object], rounds: int, stages: Sequence[str] = ()) -> None:
        """Call once to warm up, then `rounds` times; a round without one of these stages has 0 for it."""
        for turn in range(rounds + 1):
            one(turn)
            for stage in stages:
                self._round[stage] += 0.0
            if turn:
                for stage, milliseconds in self._round.items():
                    self.times[stage].append(milliseconds)
            self._round.clear()


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one memory.

    Attributes:
        stopwatch: all times.
        parts: bytes that the memory holds by part.
        slots: N; `visible` of them are shown.
        tokens: seen so far.
    """

    stopwatch: Stopwatch
    parts: dict[str, int]
    slots: int
    visible: int
    tokens: int


@torch.inference_mode()
def fill(session: Session, shape: Shape, steps: int) -> None:
    """Append steps of noise to the memory, past the model."""
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
    """Time preprocessing and vision tower, the same for every memory; return the steps too."""
    stopwatch, steps = Stopwatch(backbone.device), []

    def one(turn: int) -> None:
        prepared = stopwatch.time("preprocess", backbone.prepare, frames_of(shape, turn))
        steps.extend(stopwatch.time("vision tower", backbone.embed_steps, [prepared], [float(turn)]))

    stopwatch.rounds(one, rounds)
    return stopwatch, steps


def measure(
    backbone: Backbone,
    shape: Shape,
    config: MemoryConfig,
    steps: Sequence[StepTokens],
    rounds: int,
) -> Measured:
    """Time every stage behind the vision tower.

    Args:
        backbone: of `models.build`.
        shape: its own.
        config: of the memory.
        steps: of `see`; more than rounds.
        rounds: steps, questions' tokens and commits that are timed, after one of each that is not.
    """
    session = Session.start(backbone, config)
    room = config.near_tokens + config.prototypes if config.prototypes else config.budget
    fill(session, shape, int(_STREAM * room) // shape.tokens + _MORE)
    stopwatch = Stopwatch(backbone.device)
    parts: list[tuple[Any, str, str]] = [
        (session.backbone, "forward", "forward"),
        (session.memory, "append", "update"),
        (session.memory, "context", "context"),
    ]
    policy = session.memory._rule if isinstance(session.memory, PrototypeMemory) else None
    if isinstance(policy, BlockedRule):
        parts.append((policy, "_plan", "update: plan"))

    def step(turn: int) -> None:
        start_s = session.clock.steps * session.clock.step_seconds
        stopwatch.time("step behind the tower", session.take, [steps[turn]], [start_s])

    with stopwatch.parts(parts):
        stopwatch.rounds(step, rounds, [stage for _, _, stage in parts])
    if planned := stopwatch.times.get("update: plan"):
        updates = zip(stopwatch.times["update"], planned, strict=True)
        stopwatch.times["update: merge"] = [whole - plan for whole, plan in updates]

    def question(_: int) -> None:
        pieces = session.stream("what?", Decoding(2))
        stopwatch.time("first token", next, pieces)
        stopwatch.time("per token", next, pieces)
        pieces.close()

    stopwatch.rounds(question, rounds)
    with tempfile.TemporaryDirectory() as folder:

        def commit(turn: int) -> None:
            path = Path(folder) / f"{turn}.safetensors"
            stopwatch.time("commit", lambda: save_state(to_state(session), path), by_clock=True)
            path.unlink()

        stopwatch.rounds(commit, rounds)
    with torch.inference_mode():
        context = session.memory.context()
        keys: Any = getattr(context, "keys", None)
        visible = context.visible_tokens()
    slots = visible if keys is None else keys.shape[2]
    return Measured(stopwatch, session.memory.nbytes(), slots, visible, session.clock.tokens_seen)


def decode(path: Path, fps: float, frames: int, rounds: int, device: torch.device) -> Stopwatch:
    """Time a file's first steps, read one after the other."""
    stopwatch = Stopwatch(device)
    with open_source(path) as source:
        steps = iter(read_steps(source, fps, frames))
        stopwatch.rounds(lambda _: stopwatch.time("decode", next, steps), rounds)
    return stopwatch
