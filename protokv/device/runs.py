"""`Runs`: calls that do the same work on the same memory each time, captured as CUDA graphs and
replayed.

A forward is thousands of small kernels, which a device runs faster than Python launches them. A
graph launches them all at once. What differs from call to call is data on the device, in the
tensors that a call is given. A `Plan` is a call that was worked out on the host: its key, and a few
numbers, which come to the device in one copy.

What updates a memory runs beside what is launched after it, on a stream of its own, until somebody
reads the memory (`catch_up`).

A part of a call may differ from time to time, such as attention over the slots of the streams that
are due. It stays outside of graphs (`Runs.leave`): the call is captured in pieces around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_GRAPHS = 8  # of one name: each holds memory
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
        self._outside: Callable[..., Tensor] | None = None  # the present run has it
        self._capture: Capture | None = None  # while it captures
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
        outside: Callable[..., Tensor] | None = None,
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
            outside: what `leave` calls within `call`, and within a replay.
        """
        self._outside = outside
        try:
            if self._reads_memory:
                catch_up(self._device)
            why = self.why_not or (
                "" if key is not None else "it has other sizes or other buffers each time"
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
                        part = self._capture_call(whole, call, given)
                if not isinstance(part, str):
                    buffers, replay, result = part
                    self._launch(buffers, replay, given)
                    self.how[name] = "graph"
                    return result
                self._seen.append(whole)
                why = part
            self.how[name] = why
            return call(*given)
        finally:
            # It may hold what lies on the device.
            self._outside = None

    def leave(self, query: Tensor, given: Any) -> Tensor:
        """Return what `outside(query, given)` of the present run returns, of the size of `query`.

        Here a graph that is being captured ends, and another begins. A replay calls what is
        `outside` then; what it is given holds until it returns.
        """
        if self._capture is None:
            return self._call_outside(query, given)
        return self._capture.leave(self._call_outside, query, given)

    def _call_outside(self, query: Tensor, given: Any) -> Tensor:
        assert self._outside is not None, "nothing is outside of this run"
        return self._outside(query, given)

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

    def _capture_call(
        self, key: tuple[Hashable, ...], call: Callable[..., Any], given: tuple[Tensor, ...]
    ) -> _Part | str:
        buffers = [one.clone() for one in given]
        try:
            if self._pool is None:
                self._pool = _make_pool()
            self._capture = Capture(self._device, self._pool)
            result = self._capture.record(lambda: call(*buffers))
            self._parts[key] = buffers, self._capture.replay, result
        # A branch on a value, a library that cannot be captured, or no memory for it.
        except RuntimeError as error:
            self._parts[key] = f"not captured: {str(error).splitlines()[0]}"
        finally:
            self._capture = None
        return self._parts[key]


class Capture:
    """A call as graphs, and as calls that are made anew between them."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = pool
        self._pieces: list[Callable[[], Any]] = []
        # the place of a query that leaves the graphs, by its size: one for all layers
        self._left: dict[Hashable, Tensor] = {}

    def record(self, call: Callable[[], Any]) -> Any:
        """Capture a call, which is not run; return its result. RuntimeError: it cannot be
        captured.
        """
        self._graph = self.begin()
        try:
            return call()
        finally:
            self._end_piece()

    def leave(self, outside: Callable[..., Tensor], query: Tensor, given: Any) -> Tensor:
        """Let replays call `outside(query, given)` here; return where its result will stand."""
        size = query.shape, query.dtype, query.device
        held = self._left.get(size)
        if held is None:
            held = self._left[size] = torch.empty_like(query)
        held.copy_(query)
        self._end_piece()
        self._pieces.append(lambda: held.copy_(outside(held, given)))
        self._graph = self.begin()
        return held.clone()

    def replay(self) -> None:
        """Run all again on the same memory."""
        for piece in self._pieces:
            piece()

    def _end_piece(self) -> None:
        self._pieces.append(self.end(self._graph))

    def begin(self) -> Any:
        """Begin a graph."""
        graph = torch.cuda.CUDAGraph()
        scope = ExitStack()
        scope.enter_context(torch.cuda.device(self._device))
        # Other threads read frames and pin them meanwhile.
        scope.enter_context(
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        )
        return graph, scope

    def end(self, begun: Any) -> Callable[[], None]:
        """End a graph that `begin` returned; return what replays it."""
        graph, scope = begun
        scope.close()
        replay: Callable[[], None] = graph.replay
        return replay


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def _make_pool() -> Any:
    """Return a pool of memory that graphs share: they are replayed one after the other."""
    return torch.cuda.graph_pool_handle()


def _make_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
