"""Layers with a window or a recurrent state: transformers' logits, and what they carry in sessions
and states.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import protokv
from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone, PreparedStep
from protokv.core.layers import LayerKind
from protokv.core.step import StepTokens
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories import MemoryConfig
from protokv.state.describe import describe_state
from protokv.stream.session import Session
from protokv_cli.inspect import make_inspect_tables
from tests.backbones.test_conformance import QUESTION, assert_logits, video
from tests.backbones.tiny import BUILDERS, write_gemma4
from tests.backbones.upstream import Upstream
from tests.conftest import random_frames, watched, widen
from tests.core.streams import copy_of, same


def write_sliding(folder: Path) -> Path:
    """Write a tiny Qwen2.5-VL of one full layer and two with a window, shorter than a step and the
    question.
    """
    BUILDERS["qwen2_5_vl"](folder)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text |= {"use_sliding_window": True, "sliding_window": 5}
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


KINDS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "sliding": ("qwen2_5_vl", write_sliding),
    "linear": ("qwen3_5", BUILDERS["qwen3_5"]),
    "sliding, small": ("gemma4", lambda folder: write_gemma4(folder, window=9)),
    "sliding, large": ("gemma4", lambda folder: write_gemma4(folder, window=40, large=True)),
}


@pytest.fixture(scope="module", params=widen(KINDS, ("linear", "sliding, small")))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Backbone, Upstream]:
    family, write = KINDS[request.param]
    folder = write(tmp_path_factory.mktemp(family))
    return load_backbone(str(folder), device="cpu", dtype="float32"), Upstream(family, folder)


def windowed(backbone: Backbone, n_steps: int, **settings: object) -> Session:
    return watched(
        backbone, MemoryConfig.of("sliding-window", budget=400, **settings), range(n_steps)
    )


@pytest.mark.parametrize("pieces", [(1, 1, 3), (5,)], ids=str)
def test_a_stream_in_pieces_gives_the_whole_logits(
    model: tuple[Backbone, Upstream], pieces: tuple[int, ...]
) -> None:
    backbone, upstream = model
    steps = video(backbone, 5)
    session = Session.start(backbone, MemoryConfig.of("full", budget=64))
    for count in pieces:
        first = session.clock.steps
        prepared = [backbone.prepare(images) for images in steps[first : first + count]]
        session.watch_prepared(
            prepared, [(first + i) * session.clock.step_seconds for i in range(count)]
        )
    assert_logits(session, upstream, steps)


def test_what_is_carried_has_one_size_and_goes_on_to_the_bit(
    model: tuple[Backbone, Upstream], tmp_path: Path
) -> None:
    backbone = model[0]
    steps = video(model[0], 12)
    # A window of 40 tokens is full by then.
    whole = windowed(backbone, 8)
    before = copy_of(whole)
    logits = whole.prefill(QUESTION)
    sizes = whole.state_bytes
    whole.ask(QUESTION)
    assert same(before, whole.tensors())
    assert torch.equal(whole.prefill(QUESTION), logits)
    protokv.save(whole, tmp_path / "state.safetensors")
    resumed = protokv.load(tmp_path / "state.safetensors", backbone)
    for session in (whole, resumed):
        for images in steps[8:]:
            session.watch(images)
    assert whole.state_bytes == sizes
    assert same(resumed.tensors(), whole.tensors())


def test_inspect_tells_the_kind_of_every_layer(
    model: tuple[Backbone, Upstream], tmp_path: Path
) -> None:
    protokv.save(windowed(model[0], 1), tmp_path / "state.safetensors")
    found = describe_state(tmp_path / "state.safetensors")
    kinds = [
        kind.removesuffix("_attention") for kind in model[1].model.config.text_config.layer_types
    ]
    assert [row["kind"] for row in found["layer_kinds"]] == kinds
    assert found["bytes"]["layers"] > 8 * len(kinds)
    console = Console(file=StringIO(), width=200, record=True)
    for table in make_inspect_tables(found, layers=True):
        console.print(table)
    assert "layer kinds" in console.export_text()


def test_a_state_of_other_layers_or_without_a_tensor_is_refused(
    model: tuple[Backbone, Upstream],
) -> None:
    state = windowed(model[0], 1).make_state()
    kinds = state.tensors["layers.kinds"].clone()
    kinds[0, 0] = 2 if kinds[0, 0] != 2 else -1
    kept = [name for name in state.tensors if name.startswith("layers.")]
    broken = [{**state.tensors, "layers.kinds": kinds}]
    broken += [{name: one for name, one in state.tensors.items() if name != lost} for lost in kept]
    windows = {
        name: torch.cat([one] * 40, 1)
        for name, one in state.tensors.items()
        if name[-5:] in (".keys", "alues")
    }
    if windows := {name: one for name, one in windows.items() if name.startswith("layers.")}:
        broken.append({**state.tensors, **windows})
    for tensors in broken:
        with pytest.raises(StateCorrupt):
            Session.restore(replace(state, tensors=tensors), model[0])


def test_what_such_layers_cannot_do_is_refused(model: tuple[Backbone, Upstream]) -> None:
    with pytest.raises(ConfigError, match="recent_frames"):
        windowed(model[0], 0, recent_frames=2)
    if LayerKind.SLIDING in model[0].layer_kinds:
        with pytest.raises(ConfigError, match="positions"):
            windowed(model[0], 0, positions="compact")


def test_numbers_that_are_not_finite_do_not_stay(model: tuple[Backbone, Upstream]) -> None:
    session = windowed(model[0], 2)
    tokens = session.embed(random_frames(9, model[0].frames_per_step), 4.0)
    broken = tokens.embeddings.clone()
    broken[1] = torch.nan
    session.take([StepTokens(broken, tokens.grid, tokens.visual)], [4.0])
    assert torch.isfinite(session.prefill(QUESTION)).all()


def test_places_of_patches_of_gemma4_are_exact_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone: Any = load_backbone(str(BUILDERS["gemma4"](tmp_path)), device="cpu", dtype="bfloat16")
    places = torch.tensor([[[257.0, 1.0], [519.0, 1023.0]]])
    step = PreparedStep(torch.cat((torch.rand(1, 2, 768), places), 2), (1, 1))
    shown = []
    seen = SimpleNamespace(pooler_output=[torch.zeros(1, 8, dtype=torch.bfloat16)])
    monkeypatch.setattr(
        backbone._model, "get_image_features", lambda _, where: shown.append(where) or seen
    )
    backbone._run_tower(backbone.look, [step, step])
    assert torch.equal(shown[0], places.long().repeat(2, 1, 1))
