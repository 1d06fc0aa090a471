"""What a step costs: taking it, showing the memory, its stages, and attention over what is shown. See README.md."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from protokv.config import MemoryConfig, PaperConfig
from protokv.core import paper_rule as paper
from protokv.core import prototypes as protokv
from protokv.core.attention import attend
from protokv.core.registry import MEMORIES
from protokv.core.residuals import Residuals
from protokv.durable.agglomerative import Agglomerative
from protokv.durable.blocked import BlockedRule
from tests.benchmarks.conftest import Filled, Sizes, filled, finished

# Filling a memory of 24k tokens takes minutes on a CPU; once for all that is measured of it.
pytestmark = pytest.mark.timeout(3600)
ROUNDS = 7
# Of a step: enough for a 95th percentile, and for every head of a bank to take its turn.
STEPS = 24

PROTOKV: dict[str, Callable[[int], MemoryConfig]] = {
    **{
        f"protokv-{name}": lambda budget, name=name: MemoryConfig.of(name, budget=budget)
        for name in ("paper", "durable", "continuity")
    },
    "protokv-joint": lambda budget: PaperConfig(budget=budget, histograms="joint"),
    "protokv-variance": lambda budget: PaperConfig(budget=budget, allocation="variance"),
}
OTHERS: dict[str, Callable[[int], MemoryConfig]] = {
    kind: lambda budget, kind=kind: MemoryConfig.of(kind, budget=budget)
    for kind in MEMORIES
    if not issubclass(MEMORIES[kind], protokv.ProtoKV)
}
CASES = [(name, budget, "moving") for name in PROTOKV | OTHERS for budget in (6, 24)]
CASES += [(name, 6, "still") for name in PROTOKV]


def name_of(case: tuple[str, int, str]) -> str:
    name, budget, scene = case
    return f"{name}-{budget}k-{scene}"


def only(*cases: tuple[str, int, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=name_of, indirect=True, scope="module")


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def case(request: pytest.FixtureRequest) -> tuple[str, int, str]:
    return request.param


@pytest.fixture(scope="module")
def held(case: tuple[str, int, str], sizes: Sizes, device: torch.device) -> Filled:
    name, budget, scene = case
    return filled((PROTOKV | OTHERS)[name](budget * sizes.unit), scene, sizes, device)


@pytest.fixture
def described(
    benchmark: BenchmarkFixture, case: tuple[str, int, str], device: torch.device
) -> Callable[[str], BenchmarkFixture]:
    """The benchmark, once it is said what is measured."""

    def describe(what: str) -> BenchmarkFixture:
        name, budget, scene = case
        benchmark.group = what
        benchmark.extra_info.update(what=what, memory=name, budget=f"{budget}k", scene=scene, device=device.type)
        return benchmark

    return describe


def test_append(described: Callable[[str], BenchmarkFixture], held: Filled, device: torch.device) -> None:
    append = finished(device, held.memory.append)
    steps = lambda: ((held.stream.step(held.scene),), {})  # noqa: E731 - pedantic's form of arguments
    described("append").pedantic(append, setup=steps, rounds=STEPS, warmup_rounds=1)


def test_context_after_a_step(described: Callable[[str], BenchmarkFixture], held: Filled, device: torch.device) -> None:
    context = finished(device, held.memory.context)
    described("context").pedantic(context, setup=finished(device, held.append), rounds=ROUNDS, warmup_rounds=1)


STAGES = [
    (paper.PaperRule, "absorb_", "stage: assignment"),
    (Agglomerative, "absorb_", "stage: assignment"),
    (BlockedRule, "absorb_", "stage: assignment"),
    (Residuals, "record_", "stage: residuals"),
    (paper.PaperRule, "maintain_", "stage: maintenance"),
    (paper, "merge_", "stage: maintenance, merging alone"),
    (protokv.ProtoKV, "context", "stage: pseudo-tokens"),
]


@only(*(case for case in CASES if case[0] in PROTOKV))
def test_stages(
    described: Callable[[str], BenchmarkFixture],
    held: Filled,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: dict[str, list[float]] = defaultdict(list)

    def stopped(call: Callable[..., object], stage: str) -> Callable[..., object]:
        call = finished(device, call)

        def timed(*args: object) -> object:
            start = time.perf_counter()
            result = call(*args)
            times[stage].append(1000 * (time.perf_counter() - start))
            return result

        return timed

    for owner, name, stage in STAGES:
        monkeypatch.setattr(owner, name, stopped(getattr(owner, name), stage))

    def watched() -> None:
        held.append()
        held.memory.context()

    benchmark = described("stages")
    benchmark.pedantic(finished(device, watched), rounds=ROUNDS)
    benchmark.extra_info["stages_ms"] = dict(times)
    assert times


# Attention costs by the number of slots, which all with a budget share, and by what is retrieved.
@only(*((name, budget, "moving") for name in ("protokv-paper", "rekv") for budget in (6, 24)))
@pytest.mark.parametrize("queries", ["step", "token"])
def test_attention(
    described: Callable[[str], BenchmarkFixture],
    held: Filled,
    sizes: Sizes,
    device: torch.device,
    queries: str,
) -> None:
    shape = held.stream.shape
    T = sizes.tokens if queries == "step" else 1
    query = torch.randn(sizes.kv_heads * sizes.groups, T, sizes.head_size, device=device).to(shape.dtype)
    tail = tuple(torch.randn(sizes.kv_heads, T, sizes.head_size, device=device).to(shape.dtype) for _ in range(2))

    def over_all_layers() -> None:
        context = held.memory.context() if queries == "step" else held.memory.recall()
        for layer in range(sizes.layers):
            attend(query, context.at(layer, query), tail, sizes.head_size**-0.5)

    described(f"attention of a {queries}").pedantic(finished(device, over_all_layers), rounds=3, warmup_rounds=1)
