"""Watch, ask, save, load and resume on a device of its own, which needs no GPU: the same bytes as
on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import protokv
from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.tensors import TensorDict
from protokv.device import arrays
from protokv.ingestion.prefetch import StopRequest, prefetch_steps
from protokv.memories import MEMORIES, MemoryConfig
from protokv.stream.answer import Answer
from protokv.stream.seeing import StepsToWatch, watch_together
from protokv.stream.session import Session
from protokv.stream.together import AskedQuestion, ask_together
from protokv.video.sampling import VideoStep
from protokv.video.source import never_stop
from protokv.words.transcript import Transcript
from tests.backbones.tiny import BUILDERS
from tests.conftest import random_frames, wide
from tests.fake_cuda import data_of, fake_cuda

QUESTION = "what is the first star ?"
Load = Callable[..., Backbone]
# A window does not move with a memory.
SLIDING = ("gemma4",)


QUICK = ("durable", "paper", "rekv")
# Every memory with the family that has most to its steps, and the plainest memory with the others.
EVERY = [
    *((family, "sliding-window", "stream") for family in SLIDING),
    *(("qwen3_vl", kind, "stream") for kind in QUICK),
    *wide(*(("qwen3_vl", kind, "stream") for kind in MEMORIES if kind not in QUICK)),
    *wide(*((family, "sliding-window", "compact") for family in BUILDERS if family not in SLIDING)),
]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return a function that loads a family on the device, or on the CPU."""

    @cache
    def write(family: str) -> str:
        return str(BUILDERS[family](tmp_path_factory.mktemp(family)))

    @cache
    def load(family: str, device: str = "cuda:0", dtype: str = "float32") -> Backbone:
        with nullcontext() if device == "cpu" else fake_cuda():
            return load_backbone(write(family), device=device, dtype=dtype)

    return load


def small(kind: str, **changes: Any) -> MemoryConfig:
    """Return settings under which six steps of any family overflow a bounded memory."""
    # A step of one token is added up in another way on a CPU.
    own = {"merge_share": 0.5} if kind == "dycoke" else {}
    config = MemoryConfig.of(kind, budget=64 if kind in ("full", "rekv") else 24, **own, **changes)
    return config.with_words(True)


def held(session: Session) -> TensorDict:
    return {name: data_of(tensor).clone() for name, tensor in session.tensors().items()}


class Watched(NamedTuple):
    """A session of six steps, the logits of a question behind the first one and behind the last,
    and an answer.
    """

    session: Session
    logits: list[Tensor]
    answer: Answer


def watch_and_ask(backbone: Backbone, config: MemoryConfig) -> Watched:
    session = Session.start(backbone, config, attachments=[Transcript()])
    logits = []
    for step in range(6):
        # Not every family shows words at compact positions.
        words = ["two three"] if step % 2 and config.positions == "stream" else []
        session.watch(random_frames(step, backbone.frames_per_step), words=words)
        if step in (0, 5):
            logits.append(session.prefill(QUESTION).float().cpu())
    return Watched(session, logits, session.ask(QUESTION, Decoding(2), evidence=True))


def use(
    backbone: Backbone, config: MemoryConfig, path: Path
) -> tuple[list[TensorDict], list[object]]:
    """Return the states and the answers of a session that is saved, loaded and goes on with a chunk
    of two steps.
    """
    session, logits, answer = watch_and_ask(backbone, config)
    states = [held(session)]
    protokv.save(session, path)
    session = protokv.load(path, backbone)
    seconds = session.clock.step_seconds
    chunk = [backbone.prepare(random_frames(step, backbone.frames_per_step)) for step in (6, 7)]
    session.watch_prepared(chunk, [6 * seconds, 7 * seconds])
    told: list[object] = [[one.tolist() for one in logits], answer.text, answer.evidence]
    return [*states, held(session)], told


@pytest.mark.parametrize(("family", "kind", "positions"), EVERY)
def test_a_device_of_its_own_gives_what_the_cpu_gives(
    load: Load,
    family: str,
    kind: str,
    positions: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = load(family)
    config = small(kind, positions=positions)
    # A device adds in another order than a CPU.
    monkeypatch.setattr(arrays, "is_readable_by_numpy", lambda numbers: False)
    expected = use(load(family, "cpu"), config, tmp_path / "here.safetensors")
    monkeypatch.undo()
    with fake_cuda():
        found = use(there, config, tmp_path / "there.safetensors")
    assert found[1] == expected[1]
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


WAITS = {"gemma4": ["vision tower"]}
"""What the code of transformers waits for the device in: a tower counts pixels."""
# The others have no tower and no kind of layer that these lack, or are here at compact positions.
OTHER_FAMILIES = ("qwen3_5_moe", "gemma4", "llava_onevision", "smolvlm", "internvl")
OTHER_MEMORIES = ("sliding-window", "last-frames", "infinipot-v", "hermes", "paper")


@pytest.mark.parametrize(
    ("family", "kind", "positions"),
    [
        ("qwen3_vl", "durable", "stream"),
        ("qwen3_5", "durable", "compact"),
        *wide(*((one, "durable", "stream") for one in OTHER_FAMILIES)),
        *wide(*(("qwen3_vl", one, "stream") for one in OTHER_MEMORIES)),
        *wide(("qwen2_5_vl", "durable", "compact")),
    ],
)
def test_all_that_a_stream_does_is_captured(
    load: Load, family: str, kind: str, positions: str
) -> None:
    backbone = load(family, dtype="bfloat16")
    with fake_cuda():
        session = Session.start(
            backbone, small(kind, positions=positions), attachments=[Transcript()]
        )
        for step in range(12):
            session.watch(random_frames(step, backbone.frames_per_step))
        first, second = (
            session.ask(QUESTION, Decoding(9, temperature=0), evidence=True) for _ in range(2)
        )
    # All of the second one is replayed.
    assert (first.text, first.mean_logprob) == (second.text, second.mean_logprob)
    parts = [backbone.runs, session.memory.runs, session.runs, session._reader.runs]
    eager = [
        name for one in parts if one is not None for name, how in one.how.items() if how != "graph"
    ]
    assert eager == WAITS.get(family, []) + ["update"] * (kind == "paper")
    assert {"question", "token"} < session._reader.runs.how.keys()


# Texts before a picture of the others differ in length from time to time.
@pytest.mark.parametrize("family", ["qwen2_5_vl", *wide("qwen3_vl", "smolvlm")])
def test_streams_and_questions_together_are_captured(load: Load, family: str) -> None:
    backbone = load(family)
    with fake_cuda():
        sessions = [Session.start(backbone, small("durable")) for _ in range(4)]
        for step in range(16):
            due = [
                StepsToWatch(
                    one,
                    [backbone.prepare(random_frames(step + 5 * n, backbone.frames_per_step))],
                    [one.clock.next_start_s],
                )
                for n, one in enumerate(sessions[: 1 << step % 3])
            ]
            watch_together(due)
            assert [one.error for one in due] == [None] * len(due)
        decoding = Decoding(9, temperature=0)
        list(ask_together([AskedQuestion(one, QUESTION, decoding) for one in sessions]))
    assert backbone.runs is not None
    assert backbone.runs.how == {
        "vision tower": "graph",
        "steps together": "graph",
        "questions together": "it has other sizes or other buffers each time",
        "tokens together": "graph",
    }


def test_pictures_that_were_prefetched_are_copied_without_a_wait(load: Load) -> None:
    backbone = load("qwen2_5_vl")
    frames = [random_frames(index, backbone.frames_per_step) for index in range(4)]

    def read(_: Callable[[], bool]) -> Iterator[VideoStep]:
        return (VideoStep(float(index), one, ()) for index, one in enumerate(frames))

    with fake_cuda() as waits:
        ready = [step.prepared for step in prefetch_steps(read, backbone, StopRequest(never_stop))]
        backbone.embed_steps(ready, [0.0] * len(ready))
        counts = []
        for steps in (ready, list(map(backbone.prepare, frames))):
            waits.clear()
            backbone.embed_steps(steps, [0.0] * len(steps))
            counts.append(waits["_to_copy from memory that is not pinned"])
    assert counts == [0, len(frames)]


def test_tensors_of_two_devices_do_not_meet() -> None:
    with fake_cuda() as waits, torch.inference_mode():
        there = torch.arange(6, device="cuda:0")
        here = torch.arange(6)
        for mistake in (
            lambda: there + here,
            lambda: torch.cat((there, here)),
            lambda: here[there],
        ):
            with pytest.raises(RuntimeError, match=r"cuda:0"):
                mistake()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert not waits


@pytest.mark.parametrize(
    "read",
    [
        lambda there: there.cpu(),
        lambda there: there.tolist(),
        lambda there: int(there[0]),
        lambda there: there[there > 2],
    ],
)
def test_what_the_host_reads_is_a_wait(read: Callable[[Tensor], Any]) -> None:
    with fake_cuda() as waits, torch.inference_mode():
        there = torch.arange(6, device="cuda:0")
        assert not waits
        read(there)
        assert sum(waits.values()) == 1
