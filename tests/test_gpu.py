"""The same code on a CUDA device: within tolerance of the CPU, and back from a state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protokv.backbones import load_backbone
from protokv.core.attention import attend
from protokv.core.backbone import Backbone
from protokv.core.context import EMPTY_BIAS, KVSegment
from protokv.core.decoding import Decoding, TokenSampler
from protokv.core.slots import KVSlots
from protokv.core.tensors import MemoryShape
from protokv.device import kernels, runs
from protokv.memories import DurableConfig, MemoryConfig, PaperConfig
from protokv.stream.session import Session
from tests.backbones.tiny import BUILDERS
from tests.conftest import continued, watched
from tests.oracles import attention as plain
from tests.stub_backbone import StubBackbone
from tests.tolerance import Tolerance

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
pytestmark = [pytest.mark.gpu, NO_CUDA]
QUESTION = "what is the first star ?"


@pytest.fixture(autouse=True)
def whole_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN rounds what goes into a convolution to TF32 by default, the pictures of every vision
    tower among it.
    """
    cudnn: Any = torch.backends.cudnn
    monkeypatch.setattr(cudnn.conv, "fp32_precision", "ieee")


@pytest.fixture(scope="module")
def cuda(tiny_folder: Path) -> Backbone:
    return load_backbone(str(tiny_folder), device="cuda", dtype="float32")


# A centre of 8 bits differs by a whole unit if two sums differ in their last digit.
NEAR = {
    "paper": (PaperConfig(budget=48), 1e-3),
    "durable, 32 bits": (DurableConfig(budget=48, center_bits=32), 1e-3),
    "durable": (DurableConfig(budget=48), 1e-2),
}


@pytest.mark.parametrize(("config", "near"), NEAR.values(), ids=NEAR)
def test_a_bounded_stream_runs_and_is_repeatable_on_cuda(
    cuda: Backbone, config: MemoryConfig, near: float
) -> None:
    first, second = (watched(cuda, config, range(30)).prefill(QUESTION) for _ in range(2))
    assert first.isfinite().all()
    torch.testing.assert_close(second, first, rtol=near, atol=near)


def test_a_state_of_the_gpu_continues_on_the_cpu(tiny: Backbone, cuda: Backbone) -> None:
    config = DurableConfig(budget=48)
    there = watched(cuda, config, range(20))
    tensors = {name: tensor.cpu() for name, tensor in there.tensors().items()}
    here = continued(there, tiny, tensors=tensors)
    torch.testing.assert_close(
        here.prefill(QUESTION), there.prefill(QUESTION).cpu(), rtol=1e-3, atol=1e-3
    )


def steady(kind: str) -> Session:
    """Return a session whose memory is full."""
    session = Session.start(StubBackbone(device="cuda"), MemoryConfig.of(kind, budget=6000))
    step = session.backbone.embed_step(np.zeros(0, np.uint8))
    for index in range(40):
        session.take([step], [float(index)])
    return session


def refuse(*_: Any) -> Any:
    raise RuntimeError("no graphs")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("qwen2_5_vl", kind) for kind in ("sliding-window", "durable", "infinipot-v", "hermes")),
        *((family, "durable") for family in ("qwen3_vl", "qwen3_5", "smolvlm")),
    ],
)
def test_graphs_of_cuda_give_what_the_calls_give(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    folder = str(BUILDERS[family](tmp_path))
    for capture in (runs.Capture, refuse):
        monkeypatch.setattr(runs, "Capture", capture)
        backbone = load_backbone(folder, device="cuda", dtype="float32")
        session = watched(backbone, MemoryConfig.of(kind, budget=48), range(30))
        answers = [session.ask(QUESTION, Decoding(9, temperature=0)).text for _ in range(3)]
        used = (backbone.runs, session.runs, session._reader.runs, session.memory.runs)
        how = {name: how for one in used if one is not None for name, how in one.how.items()}
        found.append((session.prefill(QUESTION), answers, how))
    (logits, answers, how), (expected, said, _) = found
    assert set(how.values()) == {"graph"}, how
    assert answers == said
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["sliding-window", "durable", "paper"])
def test_a_decoded_token_waits_for_itself_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = steady(kind)

    def reading(token: torch.Tensor) -> int:
        torch.cuda.set_sync_debug_mode("default")
        read = int(token)
        torch.cuda.set_sync_debug_mode("error")
        return read

    session.ask("what?", Decoding(3))
    monkeypatch.setattr(TokenSampler, "fetch", staticmethod(reading))
    try:
        # Stop before the end, where the number of visible tokens is read once an answer.
        pieces = session.stream("what?", Decoding(6))
        for _ in range(4):
            next(pieces)
    finally:
        torch.cuda.set_sync_debug_mode("default")


TOLERANCE = {torch.float32: 1e-3, torch.float16: 2**-8, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("D", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("queries", "n"), [(196, 196), (1, 41), (20, 37)])
def test_the_kernels_of_cuda_equal_the_plain_form(
    dtype: torch.dtype, queries: int, n: int, D: int
) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    noise = lambda *size: torch.randn(size, generator=g, device="cuda").to(dtype)  # noqa: E731
    bias = torch.randint(1, 1_000_000, (4, 1003), generator=g, device="cuda").float().log()
    bias[:, ::7], bias[0] = EMPTY_BIAS, EMPTY_BIAS
    segment = KVSegment(noise(4, 1003, D), noise(4, 1003, D), bias)
    query = noise(28, queries, D)
    tail = (noise(4, n, D), noise(4, n, D))
    expected = plain.attend(query, [segment], tail, D**-0.5)
    near: Tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(attend(query, [segment], tail, D**-0.5), expected, **near)
    # With the columns of the bias at hand, in rows that lie apart.
    slots = KVSlots(MemoryShape(1, 4, D, 1, 0, dtype, query.device), far=0, near=1003)
    slots.keys[0], slots.values[0], slots.bias[0] = segment.keys, segment.values, bias
    slots.bias.masked_fill_(slots.bias == EMPTY_BIAS, -torch.inf)
    shown = slots.context(torch.zeros(1003, 1, dtype=torch.int64, device="cuda")).at(0, query)
    assert (shown[0].keys.shape[2] > D) == (dtype != torch.float32)
    torch.testing.assert_close(attend(query, shown, tail, D**-0.5), expected, **near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_the_log_sum_exp_knows_the_bias_to_float32(dtype: torch.dtype, D: int) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    query, keys, values = (
        torch.randn(4, size, D, generator=g, device="cuda").to(dtype) for size in (53, 1003, 1003)
    )
    bias = torch.rand(4, 1003, generator=g, device="cuda") * 14
    bias[:, ::7], bias[0] = EMPTY_BIAS, EMPTY_BIAS
    _, lse = kernels.compute_biased_attention(query, keys, values, bias, D**-0.5)
    exact = (query.double() @ keys.double().transpose(1, 2) * D**-0.5 + bias[:, None]).logsumexp(-1)
    torch.testing.assert_close(lse[1:].double(), exact[1:], rtol=0, atol=1e-4)
    assert lse[0].isfinite().all()
    assert (lse[0] < -6000).all()
