"""Sizes, filled memories and devices for the benchmarks, and the table that a run of them writes."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protokv.config import MemoryConfig
from protokv.core.memory import Memory, MemoryShape
from protokv.core.rotary import rotate
from protokv.core.step import StepKV
from protokv.memories import build_memory
from tests.core.streams import PlainRotary

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Sizes:
    """`unit` tokens are one "k" of a budget."""

    layers: int
    kv_heads: int
    head_size: int
    groups: int
    tokens: int
    unit: int


FULL = Sizes(layers=4, kv_heads=4, head_size=128, groups=7, tokens=196, unit=1000)
# What a normal test run does: the same code, one call, a few milliseconds.
SMALL = Sizes(layers=1, kv_heads=2, head_size=16, groups=2, tokens=9, unit=12)


@pytest.fixture(autouse=True)
def _decoders_are_forked() -> None:
    """Not here: what is measured begins where that of a user does."""


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> Sizes:
    option = request.config.getoption
    return FULL if option("benchmark_enable") or not option("benchmark_disable") else SMALL


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
            ],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def finished(device: torch.device, call: Callable[..., object]) -> Callable[..., object]:
    """The call, over only when the device is."""

    def timed(*args: object, **kwargs: object) -> object:
        result = call(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return result

    return timed


class Stream:
    """Steps on a square grid: "moving" is new noise each time, "still" the same tokens with a tenth of it,
    "recurring" 200 things that come again and again, with three tenths of it."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.shape = MemoryShape(sizes.layers, sizes.kv_heads, sizes.head_size, 1, 4, dtype, device)
        self.rotary = PlainRotary(sizes.head_size)
        self.rotary.frequency = self.rotary.frequency.to(device)
        self._generator = torch.Generator(device).manual_seed(0)
        side = int(sizes.tokens**0.5)
        cells = torch.arange(side, device=device)
        self._coordinates = (torch.cartesian_prod(cells, cells).flip(1) + 0.5) / side
        self._size = (sizes.layers, sizes.kv_heads, sizes.tokens, sizes.head_size)
        self._still = self._noise(), self._noise()
        self._things: tuple[Tensor, ...] = ()
        self._index = 0

    def _noise(self, *size: int) -> Tensor:
        return torch.randn(size or self._size, generator=self._generator, device=self.shape.device)

    def sink(self) -> tuple[Tensor, Tensor]:
        shape = self.shape
        size = (shape.layers, shape.kv_heads, shape.sink_tokens, shape.head_size)
        return self._noise(*size).to(shape.dtype), self._noise(*size).to(shape.dtype)

    def step(self, scene: str) -> StepKV:
        if scene == "still":
            keys, values = (part + 0.1 * self._noise() for part in self._still)
        elif scene == "recurring":
            self._things = self._things or tuple(self._noise(*self._size[:2], 200, self._size[3]) for _ in range(2))
            which = torch.randint(200, (self._size[2],), generator=self._generator, device=self.shape.device)
            keys, values = (part[:, :, which] + 0.3 * self._noise() for part in self._things)
        else:
            keys, values = self._noise(), self._noise()
        T = self._size[2]
        positions = self.shape.sink_tokens + self._index * T + torch.arange(T, device=keys.device)[:, None]
        rotated = rotate(keys, *self.rotary(positions)).to(self.shape.dtype)
        step = StepKV(rotated, values.to(self.shape.dtype), positions, self._coordinates, self._index)
        self._index += 1
        return step


@dataclass(frozen=True, slots=True)
class Filled:
    """A memory that has evicted something, and its stream."""

    memory: Memory
    stream: Stream
    scene: str

    def append(self) -> None:
        self.memory.append(self.stream.step(self.scene))


def filled(
    config: MemoryConfig, scene: str, sizes: Sizes, device: torch.device, dtype: torch.dtype | None = None
) -> Filled:
    stream = Stream(sizes, device, dtype)
    memory = build_memory(config, stream.shape, stream.rotary)
    memory.start(*stream.sink())
    # ProtoKV is full when every prototype is open; a few steps more, and its codebooks are fitted.
    room = config.near_tokens + config.prototypes if config.prototypes else config.budget
    moving = room // sizes.tokens + 5
    if scene != "moving":
        # What stands still is merged where it could open a slot, so the bank is left half open for it. It is still
        # for the bank once it comes out of the near window.
        moving = config.prototypes // 2 // sizes.tokens
    for _ in range(moving):
        memory.append(stream.step("moving"))
    for _ in range(config.near_tokens // sizes.tokens + 5 if scene != "moving" else 0):
        memory.append(stream.step(scene))
    memory.context()
    return Filled(memory, stream, scene)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table, if anything was measured."""
    benchmarks = getattr(getattr(session.config, "_benchmarksession", None), "benchmarks", [])
    measured = [bench for bench in benchmarks if bench.stats.data and "memory" in bench.extra_info]
    for name in sorted({bench.extra_info["device"] for bench in measured}):
        rows = [row for bench in measured if bench.extra_info["device"] == name for row in _rows(bench)]
        machine = _machine(name)
        RESULTS.mkdir(exist_ok=True)
        document = json.dumps({"machine": machine, "rows": rows}, indent=1)
        (RESULTS / f"{name}.json").write_text(document + "\n")
        (RESULTS / f"{name}.md").write_text(_table(machine, rows))


def _rows(bench: Any) -> Iterator[dict[str, Any]]:
    info = dict(bench.extra_info)
    stages = info.pop("stages_ms", {})
    del info["device"]
    if info["what"] != "stages":
        yield info | _milliseconds([1000 * seconds for seconds in bench.stats.data])
    for stage, times in stages.items():
        yield info | {"what": stage} | _milliseconds(times)


def _milliseconds(times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "min_ms": round(ordered[0], 3),
        "median_ms": round(ordered[len(ordered) // 2], 3),
        "p95_ms": round(ordered[(95 * len(ordered) - 1) // 100], 3),
        "worst_ms": round(ordered[-1], 3),
        "rounds": len(ordered),
    }


def _machine(device: str) -> dict[str, Any]:
    """What the figures depend on, and nothing that names the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    )
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.machine(),
        "cores": len(models) or torch.get_num_threads(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    } | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})


def _table(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    columns = ["what", "memory", "budget", "scene", "min_ms", "median_ms", "p95_ms", "worst_ms", "rounds"]
    lines = [
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "",
        "| what | memory | budget | scene | min, ms | median, ms | p95, ms | worst, ms | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
        *("| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
