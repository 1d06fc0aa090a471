"""The one writer of a state: holds the right to it, commits to it, and does so behind the stream where that pays.

With tensors on an accelerator a commit copies them there (one more copy of the state on the device, and one on the
host while it is written) and returns; a thread brings the copy to the host and writes it while the stream goes on. At
most one write is in flight: the next commit waits for it, before it copies, so that as many commits are made as were
asked for and never more than one copy exists. With tensors on the CPU a commit is written at once: hashing and writing
would only take the cores that the model computes on. The bytes are the same either way. Knows nothing of sessions.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from protokv.core.snapshot import State
from protokv.errors import ConfigError
from protokv.storage.api import commit
from protokv.storage.form import StatePath, form_of


@dataclass(frozen=True, slots=True)
class Committed:
    """A state that is on disk: its steps, its stream time and its bytes there."""

    steps: int
    stream_time_s: float
    file_bytes: int


class Writer:
    """The right to write to a path, as a context manager."""

    def __init__(self, path: StatePath, *, keep: int | None = None, background: bool | None = None) -> None:
        """Nothing is touched yet.

        Args:
            path: where the state goes.
            keep: how many commits to keep, the current one included; where None none is kept or removed.
            background: whether to write in a thread; where None, if tensors are on a CUDA device.

        Raises:
            ConfigError: `keep` is below 1.
            StateError: the path has no form.
        """
        if keep is not None and keep < 1:
            raise ConfigError(f"cannot keep {keep} commits", hint="1 is the state alone")
        self.path = path
        self._background = background
        self._form, self._keep = form_of(path), keep
        self._pool: ThreadPoolExecutor | None = None
        self._flying: Future[Committed] | None = None

    @property
    def locked(self) -> bool:
        """Whether a second writer is refused; not so where a file system has no locks."""
        return self._form.locked

    def __enter__(self) -> Self:
        """Take it. StateError if a state could not be written there; StateLocked if somebody else writes it."""
        self._form.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Wait for the write in flight and give the right back. Raises what that write failed with."""
        try:
            if self._pool is not None:
                self._pool.shutdown()
            if kind is None:
                self.landed()
        finally:
            self._form.__exit__()

    def commit(self, state: State, *, wait: bool = False) -> list[Committed]:
        """Save a state whose tensors may change as soon as this returns.

        Args:
            state: what to save.
            wait: return when it is on disk.

        Returns:
            What has come to be on disk since this was last asked, oldest first.

        Raises:
            StateLocked: somebody else has committed meanwhile, where others are not kept out but found out.
            StateError: this one or the one in flight cannot be written; what was there before still is.
        """
        landed = self.landed(wait=True)
        on_device = {tensor.device for tensor in state.tensors.values() if tensor.is_cuda}
        if wait or not (bool(on_device) if self._background is None else self._background):
            return [*landed, self._write(state)]
        # Where they are, in memory of their own.
        copied = {name: tensor.detach().clone() for name, tensor in state.tensors.items()}
        copy = replace(state, tensors=copied)
        ready = {device: torch.cuda.current_stream(device).record_event() for device in on_device}
        self._pool = self._pool or ThreadPoolExecutor(1, "protokv-commit")
        self._flying = self._pool.submit(self._bring_and_write, copy, ready)
        return landed

    def landed(self, *, wait: bool = False) -> list[Committed]:
        """The write that was in flight, if it has ended. Raises what it failed with."""
        if self._flying is None or not (wait or self._flying.done()):
            return []
        flying, self._flying = self._flying, None
        return [flying.result()]

    def _bring_and_write(self, state: State, ready: dict[torch.device, torch.cuda.Event]) -> Committed:
        # On streams of its own, or the copy to the host would wait for the model and the model for it.
        streams = {device: torch.cuda.Stream(device) for device in ready}  # type: ignore[no-untyped-call]
        tensors: dict[str, Tensor] = {}
        for name, tensor in state.tensors.items():
            if tensor.is_cuda:
                with torch.cuda.stream(streams[tensor.device]):
                    streams[tensor.device].wait_event(ready[tensor.device])
                    tensor = tensor.cpu()
            tensors[name] = tensor
        return self._write(replace(state, tensors=tensors))

    def _write(self, state: State) -> Committed:
        commit(self._form, state, self._keep)
        return Committed(state.clock.steps, state.clock.stream_time_s, self._form.stored_bytes())
