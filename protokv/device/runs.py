"""`Runs`: calls that do the same work on the same memory each time, captured as CUDA graphs and
replayed.

A forward is thousands of small kernels, which a device runs faster than Python launches them. A
graph launches them all at once. What differs from call to call is data on the device, in the
tensors that a call is given. A `Plan` is a call that was worked out on the host: its key, and a few
numbers, which come to the device in one copy.

What updates a memory runs beside what is launched after it, on a stream of its own, until somebody
reads the memory (`catch_up`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_GRAPHS = 6  # of one name: each holds memory
_LATELY = 16  # a call is captured if one of its key is among so many that came last

_Part = tuple[list[Tensor], Callable[[], None], Any]

# The streams of each device on which something runs since `catch_up`.
_beside: dict[torch.device, list[Any]] = {}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call is to do, worked out on the host alone."""

    # hashable; plans of one key are the same operations on tensors of one size
    key: Any = None
    numbers: Sequence[float] = ()  # what else it needs to know
    asks: bool = False  # whether the call asks the device, so that no two of them are the same


def catch_up(device: torch.device) -> None:
    """Let what is launched on a device from here on come after what runs beside it."""
    for stream in _beside.pop(device, ()):
        torch.cuda.current_stream(device).wait_stream(stream)


def ready_for_copy(held: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host where a device copies it while the host goes on; a copy if it is
    not there.
    """
    return held.pin_memory() if device.type == "cuda" else held


class Runs:
    """The calls of a session, of its memory, or of a vision tower."""

    why_not: str  # why nothing is captured; empty: it is
    how: dict[str, str]  # by name, how the last call was run: by a graph, or why not

    def __init__(
        self,
        device: torch.device,
        why_not: str = "",
        *,
        beside: bool = False,
        reads_memory: bool = True,
    ) -> None:
        """Capture on this device, unless there is a reason not to; `beside` what is launched later,
        until `catch_up`. What reads no memory need not wait for that.
        """
        self.why_not = why_not or ("" if _can_capture(device) else f"a {device.type} has no graphs")
        self.how = {}
        self._device = device
        self._reads_memory = reads_memory
        self._beside = beside
        self._pool = None
        self._parts: dict[tuple[Hashable, ...], _Part | str] = {}
        self._stream: Any = _make_stream(device) if beside and not self.why_not else None
        self._seen: deque[Hashable] = deque(maxlen=_LATELY)  # what was run as it is, the last of it

    def __deepcopy__(self, memo: dict[int, Any]) -> Runs:
        """Return those of a copy, which has other memory."""
        return Runs(
            self._device,
            self.why_not,
            beside=self._beside,
            reads_memory=self._reads_memory,
        )

    def stage(self, numbers: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        """Return numbers on the device, by one copy that nothing waits for."""
        staged = ready_for_copy(torch.tensor(numbers, dtype=dtype), self._device)
        return staged.to(self._device, non_blocking=True)

    def is_captured(self, name: str) -> bool:
        """Return whether the last call of this name was replayed."""
        return self.how[name] == "graph"

    def carry_out(self, name: str, plan: Plan, call: Callable[..., Any], *given: Tensor) -> None:
        """Call `call(numbers, *given)` with the numbers of a plan `[n]` float64. Where calls run
        beside others this is as `run` does it; elsewhere it is not worth a capture.
        """
        numbers = self.stage(plan.numbers)
        if self._beside:
            self.run(name, None if plan.asks else plan.key, call, numbers, *given)
        else:
            call(numbers, *given)

    def run(
        self,
        name: str,
        key: Hashable,
        call: Callable[..., Any],
        *given: Tensor,
        at_once: bool = False,
    ) -> Any:
        """Return `call(*given)`, by a graph from the second time on; its results hold until the
        next call.

        Args:
            name: what it is, for `how`.
            key: all that the work depends on besides the shapes of `given`, and data on the
                device; None: it differs each time.
            call: waits for nothing, and returns tensors, or what holds them: the same objects from
                every replay.
            given: tensors of the device, all that differs from call to call.
            at_once: capture at the first time. Then `call` changes nothing that a second one would
                see.
        """
        if self._reads_memory:
            catch_up(self._device)
        why = self.why_not or (
            "" if key is not None else "the memory shows other buffers each time"
        )
        if not why:
            whole = name, key, *((one.shape, one.dtype) for one in given)
            part = self._parts.get(whole, "its first time")
            if whole not in self._parts and (at_once or whole in self._seen):
                if sum(other[0] == name for other in self._parts) >= MOST_GRAPHS:
                    part = "it has too many shapes"
                else:
                    if at_once:
                        call(*given)
                    part = self._capture(whole, call, given)
            if not isinstance(part, str):
                self._launch(*part[:2], given)
                self.how[name] = "graph"
                return part[2]
            self._seen.append(whole)
            why = part
        self.how[name] = why
        return call(*given)

    def _launch(
        self, buffers: list[Tensor], replay: Callable[[], None], given: tuple[Tensor, ...]
    ) -> None:
        for held, new in zip(buffers, given, strict=True):
            held.copy_(new, non_blocking=True)
        if self._stream is None:
            replay()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            replay()
        _beside.setdefault(self._device, []).append(self._stream)

    def _capture(
        self, key: tuple[Hashable, ...], call: Callable[..., Any], given: tuple[Tensor, ...]
    ) -> _Part | str:
        buffers = [one.clone() for one in given]
        try:
            if self._pool is None:
                self._pool = _make_pool()
            replay, result = _capture(lambda: call(*buffers), self._device, self._pool)
            self._parts[key] = buffers, replay, result
        # A branch on a value, a library that cannot be captured, or no memory for it.
        except RuntimeError as error:
            self._parts[key] = f"not captured: {str(error).splitlines()[0]}"
        return self._parts[key]


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def _make_pool() -> Any:
    """Return a pool of memory that graphs share: they are replayed one after the other."""
    return torch.cuda.graph_pool_handle()


def _make_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _capture(
    call: Callable[[], Any], device: torch.device, pool: Any
) -> tuple[Callable[[], None], Any]:
    """Return what replays a call, which is not run, and its result. RuntimeError: it cannot be
    captured.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads read frames and pin them meanwhile.
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        result = call()
    return graph.replay, result
