"""A CUDA device without one: tensors that say `cuda:0`, hold CPU data, and fail where CUDA would.

`FakeCuda` wraps a CPU tensor. Every operation on it runs on the CPU and is checked first: tensors of two devices must
not meet but where CUDA lets them (numbers, indices, copies). A fake tensor gives its data away by `cpu`, `item` and
`tolist` alone, which count as waits. Inside `fake_cuda()` torch believes that the machine has one such device.

It shows mistakes of devices, and how often the host waits. It has no kernels of CUDA but takes the CPU's for them;
no half-precision FlexAttention, no graphs, no streams. Only a GPU shows those (`tests/test_gpu.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.counting import INDEXING, WAITS, by_mask

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# Their arguments may be of two devices: copies between them, and indices.
BETWEEN = ("copy_", "_to_copy", "to", "_copy_from", *INDEXING)


class FakeCuda(Tensor):
    """A tensor on the device. For C++ it is on `meta`, which every build of torch has."""

    data_on_cpu: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> FakeCuda:
        made: FakeCuda = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device("meta"),
        )
        made.data_on_cpu = data
        return made

    device = property(lambda _: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_cpu = property(lambda _: False)  # type: ignore[assignment]
    is_meta = property(lambda _: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: Any) -> str:
        return f"FakeCuda({self.data_on_cpu!r})"

    def get_device(self) -> int:
        return 0

    def tolist(self) -> Any:
        waits["tolist"] += 1
        return self.data_on_cpu.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of cuda:0 cannot be read as numpy: copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


waits: Counter[str] = Counter()
"""Operations for whose result the host waits, by name, since it was cleared."""


def data_of(value: Any) -> Any:
    return value.data_on_cpu if isinstance(value, FakeCuda) else value


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return an argument or a result with its tensors and devices changed, those in lists too."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, one) for one in value])
    return change(value)


def moved(value: Any) -> Any:
    """Return what the CPU takes in place of an argument."""
    return CPU if isinstance(value, torch.device) else data_of(value)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on the CPU; its results are where CUDA would have them."""
    name = func._schema.name.split("::")[1]
    values: list[Any] = []
    mapped(values.append, [*args, *kwargs.values()])
    tensors = [value for value in values if isinstance(value, Tensor)]
    here = [one for one in tensors if isinstance(one, FakeCuda)]
    elsewhere = [tuple(one.shape) for one in tensors if not isinstance(one, FakeCuda) and one.dim()]
    devices = [value for value in values if isinstance(value, torch.device)]
    if here and elsewhere and name not in BETWEEN:
        raise RuntimeError(f"{func} has tensors on cuda:0, and on the CPU {elsewhere}")
    if name in INDEXING and here and not isinstance(args[0], FakeCuda):
        raise RuntimeError(f"{func} reads a tensor of the CPU by indices on cuda:0")
    on_device = devices[0].type != "cpu" if devices else _decides(name, args, here)
    copied = not on_device and name in ("to", "_to_copy", "copy_")
    if here and (copied or name in WAITS or (name in INDEXING and by_mask(args[1]))):
        waits[name] += 1
    args, kwargs = mapped(moved, args), {key: mapped(moved, value) for key, value in kwargs.items()}
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    if name == "histc":
        # The CPU counts floats only.
        args = (args[0].float(), *args[1:])
    with _disable_current_modes():
        if name == "_scaled_dot_product_efficient_attention":
            result = _efficient(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
    # What was written in place, or returned as it was, stays the same object.
    given = {id(data_of(one)): one for one in tensors if isinstance(one, FakeCuda) == on_device}

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in given:
            return given.get(id(value), value)
        return FakeCuda(value) if on_device else value.clone() if copied else value

    return mapped(placed, result)


def _decides(name: str, args: Any, here: list[FakeCuda]) -> bool:
    """Return whether a result is on the device: that of the tensor that is written to or indexed, else of any."""
    return isinstance(args[0], FakeCuda) if name in BETWEEN and name != "to" else bool(here)


def _efficient(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, compute_lse: bool, *, scale: float, **_: Any
) -> tuple[Tensor, ...]:
    """Attend by the CPU's kernel, `[1, H, M, D]`; refuse the strides and dtypes that CUDA's refuses."""
    assert compute_lse
    assert query.shape[1] == keys.shape[1] == values.shape[1], "as many heads of keys as of queries"
    for one in (query, keys, values):
        assert one.stride(-1) == 1, f"rows of stride {one.stride(-1)}"
    if bias is not None:
        assert bias.dtype == query.dtype, f"a bias of {bias.dtype} for queries of {query.dtype}"
        assert not any(step % 8 for step in bias.stride()[:-1]), f"bias strides {bias.stride()}"
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(query, keys, values, attn_mask=bias, scale=scale)
    # The kernel returns whole tiles.
    padded = functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return out, padded, torch.zeros(()), torch.zeros(())


class _Placing(TorchDispatchMode):
    """Makes what is asked for on the device: factories have no tensor that would say so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _whole(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of torch that is run as one: torch takes it apart in another way for other devices."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        plain = {key: data_of(value) for key, value in kwargs.items()}
        result = function(*map(data_of, args), **plain)
        return FakeCuda(result) if isinstance(args[0], FakeCuda) else result

    return call


_FUNCTIONS = {name: _whole(getattr(functional, name)) for name in ("scaled_dot_product_attention", "linear")}


class _Generator:
    """Makes generators of the CPU whatever the device."""

    def __new__(cls, device: Any = None) -> Any:
        return _generator()


_generator = torch.Generator
_PROPERTIES = SimpleNamespace(total_memory=80 << 30, name="fake", major=9, minor=0, multi_processor_count=132)
_PATCHES: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "mem_get_info": lambda *_: (64 << 30, 80 << 30),
    "get_device_properties": lambda *_: _PROPERTIES,
    "synchronize": lambda *_: None,
}


@contextmanager
def fake_cuda() -> Iterator[Counter[str]]:
    """Give torch a device `cuda:0`; yield the waits for it, counted from here."""
    waits.clear()
    # Views of a wrapper cannot be made in inference mode; it is `no_grad` with less bookkeeping.
    without_gradients = patch.object(torch._C, "_InferenceMode", lambda _: torch.no_grad())
    generators = patch.object(torch, "Generator", _Generator)
    whole = patch.multiple(functional, **_FUNCTIONS)
    with patch.multiple(torch.cuda, **_PATCHES), generators, without_gradients, whole, _Placing():
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield waits
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
