"""Counting what a piece of code asks of a device: operations, and waits of the host for a result.

Under `torch.no_grad`, every call that reaches a kernel is one aten operation. Not counted are views
and allocations, which launch nothing. A wait is an operation whose result the host must know: a
number (`item`, `tolist`, `bool`), or a shape that depends on data (`nonzero`, boolean indexing,
`unique`). `torch.inference_mode` hides some of these from a dispatch mode, so what is counted runs
without it.

`FakeTensorMode` is the stricter proof and needs no memory: with no data behind tensors, it raises
at the first wait.

`Recording` does on a CPU what a CUDA graph does: it replays the operations of a piece of code on
the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protokv.device.runs import Capture

ALLOCATIONS = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
)
WAITS = (
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)
INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")


class Counting(TorchDispatchMode):
    """Attributes: `operations` and `waits`, each a count by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> Counting:
        # Numbers of a CPU are read without any dispatch.
        self._tolist = torch.Tensor.tolist
        counting = self

        def tolist(tensor: torch.Tensor) -> Any:
            counting.waits["tolist"] += 1
            return counting._tolist(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, name = func._schema.name.split("::")
        if library == "prim":
            # Questions to a fake tensor about itself.
            return func(*args, **(kwargs or {}))
        if name in WAITS or (name in INDEXING and by_mask(args[1])):
            self.waits[name] += 1
        if name not in ALLOCATIONS and not _is_view(func):
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


class Mode(TorchDispatchMode):
    """A mode that nobody compiles: torch would say so at every call, in a fifth of the time."""

    _should_skip_dynamo = classmethod(lambda cls: False)


class Recording(Mode):
    """Records operations, to replay them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # What is made is kept, so that no address means two tensors.
        self._calls.append((func, args, kwargs, result))
        return result

    @cached_property
    def _runs(self) -> list[tuple[Any, Any, Any, list[Any]]]:
        """The calls that are run again, with the leaves of their results."""
        # In inference mode some operations return a view or a copy, as they can.
        return [
            (func, args, kwargs, tree_leaves(result))
            for func, args, kwargs, result in self._calls
            if not (_is_view(func) and _share_memory(args, result))
        ]

    def replay(self) -> None:
        """Run all again on the same memory."""
        for func, args, kwargs, leaves in self._runs:
            again = func(*args, **kwargs)
            for held, new in zip(leaves, tree_leaves(again), strict=True):
                if isinstance(held, torch.Tensor) and held is not new:
                    # Some operations squeeze in place what another one returned.
                    held.copy_(new if new.shape == held.shape else new.view_as(held))


def by_mask(indices: Any) -> bool:
    return any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in indices
    )


class RecordedCapture(Capture):
    """Stands in for `protokv.device.runs.Capture`. Recording a call runs it, so the first replay
    does nothing, unless something stayed outside.
    """

    is_run = False  # whether what was recorded has run just now

    def replay(self) -> None:
        if self.is_run and len(self._pieces) == 1:
            self.is_run = False
        else:
            super().replay()

    def begin(self) -> Any:
        self.is_run = True
        return Recording().__enter__()

    def end(self, begun: Any) -> Callable[[], None]:
        begun.__exit__(None, None, None)
        replay: Callable[[], None] = begun.replay
        return replay


def _share_memory(given: Any, result: Any) -> bool:
    some = (
        {
            one.untyped_storage().data_ptr()
            for one in tree_leaves(part)
            if isinstance(one, torch.Tensor)
        }
        for part in (given, result)
    )
    return not next(some).isdisjoint(next(some))


@cache
def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(
        part.alias_info is not None and not part.alias_info.is_write for part in returned
    )
