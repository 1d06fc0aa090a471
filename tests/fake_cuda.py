"""A CUDA device without one: tensors that say `cuda:0`, hold CPU data, and fail where CUDA would.

`FakeCuda` wraps a CPU tensor. Every operation on it runs on the CPU and is checked first: tensors
of two devices must not meet but where CUDA lets them (numbers, indices, copies). A fake tensor
gives its data away by `cpu`, `item` and `tolist` alone, which count as waits, and so does a copy
from memory that is not pinned. Attention returns its output in the layout that the kernel's own
meta function gives. Inside `fake_cuda()` torch believes that the machine has one such device;
inside a `FakeCapture` the first wait is an error, as in the capture of a CUDA graph.

Only a GPU shows (`tests/test_gpu.py`, `python -m tests.benchmarks.gpu`) what CUDA's kernels round,
the layout of what is not attention, whether a graph can be replayed, streams, several devices,
quantized weights, times and peaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from protokv.device import runs
from tests.counting import INDEXING, WAITS, Mode, RecordedCapture, by_mask

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Their arguments may be of two devices: copies between them, and indices.
COPIES = ("copy_", "_to_copy", "to")
BETWEEN = (*COPIES, "_copy_from", *INDEXING)
# They take a number that is a tensor of the CPU, as operations on single elements do.
NUMBERS = ("fill_", "masked_fill", "masked_fill_", "index_fill_")
ATTENTION = (
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_flash_attention_forward",
)


class FakeCuda(Tensor):
    """A tensor on the device. For C++ it is on `meta`, which every build of torch has."""

    data_on_cpu: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> FakeCuda:
        made: FakeCuda = Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device("meta"),
        )
        made.data_on_cpu = data
        return made

    device = property(lambda _: CUDA)
    is_cuda = property(lambda _: True)
    is_cpu = property(lambda _: False)
    is_meta = property(lambda _: False)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.data_on_cpu.data_ptr()

    def untyped_storage(self) -> Any:
        return self.data_on_cpu.untyped_storage()

    def tolist(self) -> Any:
        wait("tolist")
        return self.data_on_cpu.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of cuda:0 cannot be read as numpy: copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


waits: Counter[str] = Counter()
"""Operations for whose result the host waits, by name, since it was cleared."""
_captures: list[None] = []
# By address; they are kept, so that an address means one tensor.
_pinned: dict[int, Tensor] = {}


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


def wait(name: str) -> None:
    """Count an operation for which the host waits; in a capture refuse it."""
    waits[name] += 1
    if _captures:
        raise RuntimeError(f"{name} while a graph is captured")


@cache
def name_of(func: Any) -> str:
    """Return the name of an operation without its library and overload."""
    return str(func._schema.name.split("::")[1])


def _gather(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _gather(value, found)
        else:
            found.append(value)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on the CPU; its results are where CUDA would have them."""
    name = name_of(func)
    values: list[Any] = []
    _gather((*args, *kwargs.values()), values)
    here = [value for value in values if isinstance(value, FakeCuda)]
    others = [
        value for value in values if isinstance(value, Tensor) and not isinstance(value, FakeCuda)
    ]
    devices = [value for value in values if isinstance(value, torch.device)]
    if name == "is_pinned":
        return args[0].untyped_storage().data_ptr() in _pinned
    # A result is where the tensor is that is written to or indexed, else where any is.
    if devices:
        on_device = devices[0].type != "cpu"
    elif name in BETWEEN and name != "to":
        on_device = isinstance(args[0], FakeCuda)
    else:
        on_device = bool(here)
    if name == "scalar_tensor" and devices and devices[0].type == "meta":
        # A number that is written to CUDA by indices stands on the CPU first.
        on_device = False
    if others:
        _check(func, name, args, here, others, on_device)
    copied = not on_device and name in COPIES
    if here and (copied or name in WAITS or (name in INDEXING and by_mask(args[1]))):
        wait(name)
    args = mapped(moved, args)
    kwargs = {key: mapped(moved, value) for key, value in kwargs.items()}
    pinned = kwargs.pop("pin_memory", False)
    if name == "histc":
        # The CPU counts floats only.
        args = (args[0].float(), *args[1:])
    # Mostly no other mode is left, and to ask that is quicker than to leave none.
    modes = _disable_current_modes if torch._C._len_torch_dispatch_stack() else nullcontext
    with modes():
        result: Any = _attend(func, *args, **kwargs) if name in ATTENTION else func(*args, **kwargs)
    if pinned:
        _pinned[result.untyped_storage().data_ptr()] = result
    # What was written in place, or returned as it was, stays the same object.
    given = {id(data_of(one)): one for one in (here if on_device else others)}

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in given:
            return given.get(id(value), value)
        return FakeCuda(value) if on_device else value.clone() if copied else value

    return mapped(placed, result)


def _check(
    func: Any, name: str, args: Any, here: list[FakeCuda], others: list[Tensor], on_device: bool
) -> None:
    """Refuse tensors of two devices where CUDA does; count copies from memory that is not
    pinned.
    """
    if name in (*COPIES, *INDEXING):
        if name in INDEXING and here and not isinstance(args[0], FakeCuda):
            raise RuntimeError(f"{func} reads a tensor of the CPU by indices on cuda:0")
        if (
            name in INDEXING
            and any(one.dim() for one in others if len(args) > 2 and one is args[2])
            and here
        ):
            raise RuntimeError(f"{func} writes {tuple(args[2].shape)} of the CPU to cuda:0")
        if on_device and any(one.untyped_storage().data_ptr() not in _pinned for one in others):
            wait(f"{name} from memory that is not pinned")
        return
    with_numbers = torch.Tag.pointwise in func.tags or name in NUMBERS
    refused = [tuple(one.shape) for one in others if one.dim() or not with_numbers]
    written = name.endswith("_") and not isinstance(args[0], FakeCuda)
    if here and (refused or written) and name not in BETWEEN:
        raise RuntimeError(f"{func} has tensors on cuda:0, and on the CPU {refused}")


def _attend(
    func: Any, query: Tensor, keys: Tensor, values: Tensor, *given: Any, scale: float
) -> tuple[Any, ...]:
    """Attend by the CPU's kernel, `[1, H, M, D]`; results are laid out as CUDA's, and refused is
    what it refuses.
    """
    if func._schema.name == "aten::_flash_attention_forward":
        return _attend_in_parts(query, keys, values, *given, scale=scale)
    assert query.shape[1] == keys.shape[1] == values.shape[1], "as many heads of keys as of queries"
    assert query.shape[3] == keys.shape[3] == values.shape[3], "values as long as keys"
    for one in (query, keys, values):
        assert one.stride(-1) == 1, f"rows of stride {one.stride(-1)}"
        aligned = not any(
            step * one.itemsize % 16 for step in (*one.stride()[:-1], one.storage_offset())
        )
        assert aligned, (
            f"rows that do not begin at 16 bytes: {one.stride()} from {one.storage_offset()}"
        )
    bias = None
    if "flash" in func._schema.name:
        assert query.dtype in (torch.float16, torch.bfloat16), f"flash attention of {query.dtype}"
        assert query.shape[3] <= 256, f"flash attention of heads of {query.shape[3]}"
        assert given in ((), (0.0, False, False))
    else:
        bias, compute_lse = given
        assert compute_lse
    if bias is not None:
        assert bias.dtype == query.dtype, f"a bias of {bias.dtype} for queries of {query.dtype}"
        assert not any(step % 8 for step in bias.stride()[:-1]), f"bias strides {bias.stride()}"
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=bias, scale=scale
    )
    outside = [
        one.to("meta") if isinstance(one, Tensor) else one for one in (query, keys, values, *given)
    ]
    like = func(*outside, scale=scale)
    # The memory-efficient kernel returns the log-sum-exp of whole tiles.
    padded = functional.pad(lse, (0, like[1].shape[-1] - lse.shape[-1]), value=torch.inf)
    laid_out = [
        torch.empty_strided(one.shape, one.stride(), dtype=data.dtype).copy_(data)
        for data, one in ((out, like[0]), (padded, like[1]))
    ]
    return (*laid_out, *(torch.zeros(()) for _ in like[2:]))


def _attend_in_parts(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    begins: Tensor,
    same: Tensor,
    most: int,
    *_: Any,
    scale: float,
) -> tuple[Tensor, ...]:
    """Attend with `[n, H, D]` in each part of a sequence by itself."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert begins.dtype == torch.int32
    assert most == int(begins.diff().max())
    parts = [one.split(begins.diff().tolist()) for one in (query, keys, values)]
    each = (
        functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), scale=scale
        )
        for q, k, v in zip(*parts, strict=True)
    )
    return (torch.cat([one.transpose(0, 1) for one in each]), *(torch.zeros(()) for _ in range(4)))


class _Placing(Mode):
    """Makes what is asked for on the device: factories have no tensor that would say so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _whole(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of torch that is run as one: torch takes it apart in another way for other
    devices.
    """

    def call(*args: Any, **kwargs: Any) -> Tensor:
        plain = {key: data_of(value) for key, value in kwargs.items()}
        result = function(*map(data_of, args), **plain)
        if not isinstance(args[0], FakeCuda):
            return result
        # CUDA's attention lays tokens before heads.
        return FakeCuda(
            result.transpose(1, 2).contiguous().transpose(1, 2) if result.ndim == 4 else result
        )

    return call


_FUNCTIONS = {
    name: _whole(getattr(functional, name)) for name in ("scaled_dot_product_attention", "linear")
}


_PROPERTIES = SimpleNamespace(
    total_memory=80 << 30, name="fake", major=9, minor=0, multi_processor_count=132
)
_PATCHES: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "mem_get_info": lambda *_: (64 << 30, 80 << 30),
    "get_device_properties": lambda *_: _PROPERTIES,
    "synchronize": lambda *_: None,
}


def _pin(data: Tensor) -> Tensor:
    pinned = data.clone()
    _pinned[pinned.untyped_storage().data_ptr()] = pinned
    return pinned


class FakeCapture(RecordedCapture):
    """Records the graphs of a device that is none, and refuses what a graph of CUDA cannot
    capture: waits, and copies from memory that is not pinned.
    """

    def begin(self) -> Any:
        _captures.append(None)
        return super().begin()

    def end(self, begun: Any) -> Callable[[], None]:
        _captures.pop()
        return super().end(begun)


@contextmanager
def fake_cuda() -> Iterator[Counter[str]]:
    """Give torch a device `cuda:0`; yield the waits for it, counted from here."""
    waits.clear()
    _pinned.clear()
    # Views of a wrapper cannot be made in inference mode; it is `no_grad` with less bookkeeping.
    without_gradients = patch.object(torch._C, "_InferenceMode", lambda _: torch.no_grad())
    generators = patch.object(torch, "Generator", lambda device=None, made=torch.Generator: made())
    functions: dict[str, Any] = _FUNCTIONS
    whole = patch.multiple(functional, **functions)
    # Threads pin memory, too, and no mode of torch reaches these.
    pinning = patch.object(Tensor, "pin_memory", _pin)
    captures = patch.multiple(
        runs, Capture=FakeCapture, _make_pool=lambda: None, _make_stream=lambda _: None
    )
    with (
        patch.multiple(torch.cuda, **_PATCHES),
        generators,
        without_gradients,
        whole,
        pinning,
        captures,
        _Placing(),
    ):
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield waits
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
