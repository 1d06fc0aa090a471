"""How many operations and host waits a session adds to a forward, counted at the shapes of a 7B
model.

How they are counted is in `counting`. The model is a stub that attends and does nothing else.
Bounds are of one steady step at 4 KV heads of 128 and 196 tokens a step, in bfloat16: of everything
between the vision tower and the next step, attention and the update of the memory alike. A bound is
so many operations, and so many more a layer. It is held at 3 layers by default, and at the 28 of a
7B model among the slow tests.
"""

from collections import Counter
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from protokv.core import rotary
from protokv.core.decoding import Decoding, TokenSampler
from protokv.core.settings import PositionMode
from protokv.core.step import StepKV
from protokv.memories import MemoryConfig
from protokv.memories.durable import rule
from protokv.memories.durable.repeats import DEEP_MODEL_LAYERS
from protokv.stream.session import Session
from tests.conftest import slow, wide
from tests.counting import Counting
from tests.stub_backbone import StubBackbone

# Memories whose decoding steps do not wait for the device.
DECODED = ["sliding-window", "durable", "paper", "continuity"]
# Operations of a step, and those that each layer adds: 236 and 500 at 28 layers, and 580 and 1,440
# at compact positions, where each layer's queries are turned for the near window, and its far keys
# for themselves. Casts are seen only where nothing runs in inference mode.
OPERATIONS = {
    "stream": {"sliding-window": (42, 7), "durable": (275, 7)},
    "compact": {"sliding-window": (162, 15), "durable": (392, 38)},
}
# To find what stays in view, and to weigh it, in deep models.
OPERATIONS_OF_REPEATS = 34
# Of a decoded token; at compact positions keys are turned before the first token.
DECODING_OPERATIONS = {"stream": (16, 10), "compact": (6, 16)}


@pytest.fixture(autouse=True)
def _seen_by_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in inference mode is hidden from a dispatch mode in part. Decorated methods go
    without it.
    """
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad())
    methods: dict[str, Any] = {**vars(Session)}
    for name, method in methods.items():
        if isinstance(method, FunctionType) and method.__code__.co_name in (
            "decorate_context",
            "generator_context",
        ):
            monkeypatch.setattr(Session, name, vars(method)["__wrapped__"])


def watch(session: Session) -> None:
    step = session.backbone.embed_step(np.zeros(0, np.uint8))
    with torch.no_grad():
        session.take([step], [session.clock.steps * 1.0])


def filled(
    backbone: StubBackbone, kind: str, budget: int, steps: int, positions: PositionMode = "stream"
) -> Session:
    """A session that has seen as many steps; the model is left out for all but the last two."""
    session = Session.start(backbone, MemoryConfig.of(kind, budget=budget, positions=positions))
    T = len(backbone.step.embeddings)
    keys = torch.randn(backbone.layers, backbone.kv_heads, T, backbone.head_size).to(backbone.dtype)
    for index in range(steps - 2):
        places = backbone.step_positions(
            backbone.step, origin=14, start=14, index=index, time_s=index
        ).positions
        session.memory.append(StepKV(keys + index % 7, keys, places, torch.rand(T, 2), index))
    session.clock = replace(
        session.clock,
        steps=steps - 2,
        stream_time_s=steps - 2.0,
        next_position=14 + steps,
        tokens_seen=T * (steps - 2),
    )
    for _ in range(2):
        watch(session)
    return session


def at(layers: int, bound: tuple[int, int]) -> int:
    fixed, a_layer = bound
    return fixed + a_layer * layers


@pytest.mark.parametrize(
    ("kind", "budget", "layers", "positions"),
    [
        # A ring takes the same operations at any size.
        ("sliding-window", 1000, 3, "stream"),
        *wide(("sliding-window", 1000, 3, "compact"), ("durable", 4000, 3, "stream")),
        ("durable", 4000, 3, "compact"),
        ("durable", 4000, DEEP_MODEL_LAYERS, "stream"),
        *slow(
            *(
                (kind, budget, 28, positions)
                for kind, budget in (
                    ("sliding-window", 1000),
                    ("durable", 6000),
                    ("durable", 24_000),
                )
                for positions in ("stream", "compact")
            )
        ),
    ],
)
def test_a_steady_step_waits_for_nothing_and_costs_few_operations(
    kind: str, budget: int, layers: int, positions: PositionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a CPU works through a bank in parts.
    monkeypatch.setattr(rule, "_AT_ONCE", {})
    monkeypatch.setattr(rotary, "_ROWS", 2**40)
    # Its rates are read off the model once, which takes data.
    precise = StubBackbone(layers=1).precise_rotary
    # Without data behind the tensors, a wait would raise.
    with FakeTensorMode(), Counting() as counting:
        backbone = StubBackbone(layers=layers)
        backbone.precise_rotary = precise
        precise._made = {
            backbone.device: (
                torch.empty(64, dtype=torch.int64),
                torch.empty(64, dtype=torch.int64),
            )
        }
        # Whether a stream is beyond the model's range is not asked either.
        backbone.max_position = 20 if positions == "compact" else None
        session = filled(backbone, kind, budget, budget // 196 + 3, positions)
        if positions == "compact":
            session.clock = replace(session.clock, next_position=500_000)
        counts = []
        counting.waits.clear()
        for _ in range(3):
            counting.operations.clear()
            watch(session)
            counts.append(counting.operations.total())
    assert not counting.waits
    most = at(layers, OPERATIONS[positions][kind]) + OPERATIONS_OF_REPEATS * (
        kind == "durable" and layers >= DEEP_MODEL_LAYERS
    )
    assert max(counts) <= most, counting.operations
    # The same work in every step.
    assert len(set(counts)) == 1


def test_the_proof_would_notice_a_wait() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        int(torch.zeros(3).max())
    with torch.no_grad(), Counting() as counting:
        numbers = torch.arange(5)
        numbers[numbers > 2]
        numbers[numbers > 2] = 0
        numbers.nonzero(as_tuple=True)
        numbers.max().item()
        numbers.tolist()
    assert counting.waits == {
        "index": 1,
        "index_put_": 1,
        "nonzero": 1,
        "_local_scalar_dense": 1,
        "tolist": 1,
    }


PENALISED = Decoding(6, temperature=0.7, top_k=9, repetition_penalty=1.1)
PENALTY_OPERATIONS = 24


class Spy:
    """Stands for `TokenSampler.fetch`: the operations between two reads are those of one decoding
    step.
    """

    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self.steps: list[tuple[Counter[str], Counter[str]]] = []

    def __call__(self, token: torch.Tensor) -> int:
        self.steps.append((Counter(self._counting.operations), Counter(self._counting.waits)))
        self._counting.operations.clear()
        self._counting.waits.clear()
        return 7


@pytest.mark.parametrize("kind", DECODED)
@pytest.mark.parametrize(
    ("positions", "decoding"),
    [
        ("stream", Decoding(6, temperature=0.7, top_p=0.9)),
        ("compact", Decoding(6)),
        ("stream", PENALISED),
    ],
    ids=["stream-drawn", "compact-greedy", "stream-penalised"],
)
def test_a_decoding_step_waits_for_its_token_alone(
    kind: str, positions: PositionMode, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The counts are those of any size; with data, since some memories wait before the question is
    # forwarded.
    backbone = StubBackbone(layers=3, kv_heads=2, groups=2, head_size=16, grid=(3, 3))
    session = filled(backbone, kind, 72, 12, positions)
    with Counting() as counting:
        spy = Spy(counting)
        monkeypatch.setattr(TokenSampler, "fetch", spy)
        for _ in range(2):
            spy.steps.clear()
            assert session.ask("what?", decoding).tokens == 6
    # The first token makes room for more.
    _, _, *steps = spy.steps
    assert len(steps) == 4
    for operations, waits in steps:
        assert not waits
        most = at(backbone.layers, DECODING_OPERATIONS[positions]) + PENALTY_OPERATIONS * (
            decoding is PENALISED
        )
        assert operations.total() <= most
    assert len({operations.total() for operations, _ in steps}) == 1
