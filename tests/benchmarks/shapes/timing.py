"""Time by stage: a stopwatch around calls, and the numbers of a distribution. Knows no model and no memory.

On CUDA by events on the stream, with the device idle before each call, so a stage pays for its own launches and for
nothing else's work. On a CPU by the time of the process, which a busy machine disturbs less than the clock on the wall.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "stage: "


class Stopwatch:
    """What each stage took.

    Attributes:
        times: milliseconds by stage, one number a round.
        peaks: bytes by stage that torch allocated above what was held before it; of every round on CUDA, on a CPU of
            those in `peaks_of`.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._marking = False
        self._round: dict[str, float] = defaultdict(float)
        # The most bytes that were allocated since each stage began that has not ended, outermost first.
        self._open: list[int] = []
        self.times: dict[str, list[float]] = defaultdict(list)
        self.peaks: dict[str, int] = defaultdict(int)

    def time(self, stage: str, call: Callable[..., Any], *args: Any, by_clock: bool = False, **kwargs: Any) -> Any:
        """Call, and add what it took to the stage; several calls in a round are one number."""
        if self._cuda:
            return self._on_cuda(stage, call, *args, **kwargs)
        if self._marking:
            with record_function(_MARK + stage):
                return call(*args, **kwargs)
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
        """A stage within a stage counts for both."""
        most = torch.cuda.max_memory_allocated(self._device)
        self._open = [max(peak, most) for peak in self._open]
        torch.cuda.reset_peak_memory_stats(self._device)

    def peaks_of(self, round_: Callable[[], object]) -> None:
        """Call once more for the peaks of its stages: on a CPU by the profiler, which would disturb what is timed."""
        if self._cuda:
            round_()
            return
        self._marking = True
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                round_()
        finally:
            self._marking = False
        results = profiled.profiler.kineto_results  # type: ignore[union-attr]
        stages, changes = [], []
        for event in results.events():
            if event.name() == "[memory]":
                changes.append((event.start_ns(), event.nbytes()))
            elif event.name().startswith(_MARK):
                start = event.start_ns()
                stages.append((event.name().removeprefix(_MARK), start, start + event.duration_ns()))
        for stage, begin, end in stages:
            self.peaks[stage] = max(self.peaks[stage], peak_within(changes, begin, end))

    def wrap(self, owner: object, name: str, stage: str) -> None:
        """Let a method of one object be timed wherever it is called from."""
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: self.time(stage, call, *args, **kwargs))

    def end_round(self, *, count: bool = True) -> None:
        """Take the numbers of a round; where it does not count, drop them."""
        if count:
            for stage, milliseconds in self._round.items():
                self.times[stage].append(milliseconds)
        self._round.clear()

    def none_in_this_round(self, stage: str) -> None:
        """A stage that a round may do without counts as 0 there."""
        self._round[stage] += 0.0


def distribution(times: Sequence[float]) -> dict[str, float | int]:
    """Median, 95th percentile (the nearest rank) and worst, in the unit of the times."""
    ordered = sorted(times)
    n = len(ordered)
    return {
        "median_ms": round((ordered[(n - 1) // 2] + ordered[n // 2]) / 2, 3),
        "p95_ms": round(ordered[-(-95 * n // 100) - 1], 3),
        "worst_ms": round(ordered[-1], 3),
        "rounds": n,
    }


def peak_within(changes: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    """The most bytes above the level at `begin`, from (time, bytes taken or given back) in any order."""
    level = most = 0
    for at, nbytes in sorted(changes):
        if begin <= at <= end:
            level += nbytes
            most = max(most, level)
    return most
