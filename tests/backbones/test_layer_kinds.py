"""Layers with a window or a recurrent state: what they carry in sessions and states."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import protokv
from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone, PreparedStep
from protokv.core.layers import LayerKind, is_window_tensor
from protokv.core.step import StepTokens
from protokv.core.tensors import TensorDict
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories import MemoryConfig
from protokv.state.describe import describe_state
from protokv.stream.session import Session
from tests.backbones.test_conformance import QUESTION
from tests.backbones.tiny import BUILDERS
from tests.conftest import random_frames, watched, widen

KINDS = (
    "qwen3_5",
    "gemma4 of short windows",
    "gemma4 that is large",
    "qwen2_5_vl of sliding layers",
)


@pytest.fixture(scope="module", params=widen(KINDS, KINDS[:2]))
def made(request: pytest.FixtureRequest) -> str:
    return request.param


def windowed(backbone: Backbone, n_steps: int, **settings: object) -> Session:
    return watched(
        backbone, MemoryConfig.of("sliding-window", budget=400, **settings), range(n_steps)
    )


def test_inspect_tells_the_kind_of_every_layer(
    folder: Path, backbone: Backbone, tmp_path: Path
) -> None:
    protokv.save(windowed(backbone, 1), tmp_path / "state.safetensors")
    found = describe_state(tmp_path / "state.safetensors")
    kinds = AutoConfig.from_pretrained(folder).text_config.layer_types
    assert [f"{row['kind']}_attention" for row in found["layer_kinds"]] == kinds
    assert found["bytes"]["layers"] > 8 * len(kinds)


def test_a_state_of_other_layers_or_without_a_tensor_is_refused(backbone: Backbone) -> None:
    state = windowed(backbone, 1).make_state()
    held = {name: one for name, one in state.tensors.items() if name.startswith("layers.")}
    kinds = held["layers.kinds"].clone()
    kinds[0, 0] = 2 if kinds[0, 0] != 2 else -1
    changes: list[TensorDict] = [{"layers.kinds": kinds}]
    changes += [
        {name: torch.cat([one] * 40, 1)} for name, one in held.items() if is_window_tensor(name)
    ]
    broken = [{**state.tensors, **change} for change in changes]
    broken += [{name: one for name, one in state.tensors.items() if name != lost} for lost in held]
    for tensors in broken:
        with pytest.raises(StateCorrupt):
            Session.restore(replace(state, tensors=tensors), backbone)


def test_what_such_layers_cannot_do_is_refused(backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="recent_frames"):
        windowed(backbone, 0, recent_frames=2)
    if LayerKind.SLIDING in backbone.layer_kinds:
        with pytest.raises(ConfigError, match="positions"):
            windowed(backbone, 0, positions="compact")


def test_numbers_that_are_not_finite_do_not_stay(backbone: Backbone) -> None:
    session = windowed(backbone, 2)
    tokens = session.embed(random_frames(9, backbone.frames_per_step), 4.0)
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
    monkeypatch.setattr(
        backbone._model,
        "get_image_features",
        lambda _, where: SimpleNamespace(pooler_output=shown.append(where)),
    )
    backbone.look([step])
    assert torch.equal(shown[0], places.long())
