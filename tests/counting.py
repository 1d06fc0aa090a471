"""Counting what a piece of code asks of a device: operations, and waits of the host for a result.

Under `torch.no_grad`, every call that reaches a kernel is one aten operation. Not counted are views and allocations,
which launch nothing. A wait is an operation whose result the host must know: a number (`item`, `tolist`, `bool`), or a
shape that depends on data (`nonzero`, boolean indexing, `unique`). `torch.inference_mode` hides some of these from a
dispatch mode, so what is counted runs without it.

`FakeTensorMode` is the stricter proof and needs no memory: with no data behind tensors, it raises at the first wait.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "detach")
WAITS = (
    "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
    "unique_consecutive", "bincount",
)  # fmt: skip
INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")


class Counting(TorchDispatchMode):
    """Attributes: `operations` and `waits`, each a count by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> Counting:
        # Numbers of a CPU are read without any dispatch.
        self._tolist, counting = torch.Tensor.tolist, self

        def tolist(tensor: torch.Tensor) -> Any:
            counting.waits["tolist"] += 1
            return counting._tolist(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

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


def by_mask(indices: Any) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(part.alias_info is not None and not part.alias_info.is_write for part in returned)
