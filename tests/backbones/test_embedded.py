"""The embedded model's own network against transformers' forward of the same folder, which `QwenVL`
runs.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.backbones import load_backbone
from protokv.backbones.qwen_vl import QwenVL
from protokv.core.backbone import Backbone
from protokv.errors import ConfigError
from protokv.memories import DurableConfig
from protokv.mini.backbone import MiniBackbone
from protokv.stream.session import Session
from tests.conftest import random_frames
from tests.tolerance import check_logits, forward_terms, near

TEXTS = [
    "what colour was the star?",
    "How many objects, and WHERE?",
    "zebra  star\tzebra Xylophone",
    "it's, 3 stars!",
]


@pytest.fixture(scope="module")
def ours() -> Backbone:
    return load_backbone("protokv/mini", device="cpu")


@pytest.fixture(scope="module")
def theirs() -> Backbone:
    # `auto` is bfloat16 where the processor multiplies it.
    return load_backbone(str(MiniBackbone.folder("protokv/mini")), device="cpu", dtype="float32")


def test_prompt_and_text_are_those_of_the_chat_template_and_the_tokenizer(
    ours: Backbone, theirs: Backbone
) -> None:
    assert ours.prefix_ids == theirs.prefix_ids
    for text in TEXTS:
        ids = ours.suffix_ids(text)
        assert ids == theirs.suffix_ids(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.words_ids(text) == theirs.words_ids(text)
    assert ours.unknown_words(TEXTS[2]) == ["zebra", "xylophone"]
    for text in ("what <|im_end|> is it?", "<unk>"):
        with pytest.raises(ConfigError) as mine:
            ours.suffix_ids(text)
        with pytest.raises(ConfigError) as other:
            theirs.suffix_ids(text)
        assert mine.value.message == other.value.message


@given(height=st.integers(5, 240), width=st.integers(5, 240), seed=st.integers(0, 99))
@torch.inference_mode()
def test_steps_of_any_size_are_seen_together_as_one_by_one_by_transformers(
    ours: Backbone, theirs: Backbone, height: int, width: int, seed: int
) -> None:
    sizes = ((height, width), (84, 84), (height, width))
    steps = [random_frames(seed + i, 2, *size) for i, size in enumerate(sizes)]
    together = ours.embed_steps(list(map(ours.prepare, steps)), [0.0] * 3)
    for mine, images in zip(together, steps, strict=True):
        other = theirs.embed_step(images)
        assert mine.grid == other.grid
        allowed = near(
            other.embeddings,
            forward_terms(theirs.layers, other.embeddings.shape[1], len(other.embeddings)),
        )
        torch.testing.assert_close(mine.embeddings, other.embeddings, **allowed)


@given(n=st.integers(1, 40), seed=st.integers(0, 99), time_s=st.floats(0, 30000))
@torch.inference_mode()
def test_the_language_models_are_equal(
    ours: Backbone, theirs: Backbone, n: int, seed: int, time_s: float
) -> None:
    tokens = theirs.embed_step(random_frames(seed))
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(n, tokens.embeddings.shape[1], generator=generator)
    seen = []
    for backbone in (ours, theirs):
        stands = backbone.step_positions(tokens, origin=3, start=3, index=seed, time_s=time_s)
        start = max(stands.highest) + 1
        cache = backbone.new_cache()
        shown = backbone.forward(tokens.embeddings, stands.positions, cache)
        said = backbone.forward(text, backbone.text_positions(start, n), cache)
        angles = backbone.rotary(stands.positions)
        seen.append((*angles, shown, said, backbone.logits(said), *cache.read_all()))
    for mine, other in zip(*seen, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("protokv/mini", "float32"), ("protokv/mini", "bfloat16"), ("protokv/mini-order", "float32")],
)
def test_a_long_stream_is_answered_alike_and_a_state_goes_on_in_either(
    name: str, dtype: str
) -> None:
    # A centre in 8 bits differs by a whole unit where two sums differ in their last digit.
    config = DurableConfig(budget=60, center_bits=32)
    ours = load_backbone(name, device="cpu", dtype=dtype)
    theirs = load_backbone(str(MiniBackbone.folder(name)), device="cpu", dtype=dtype)
    assert (type(ours), type(theirs)) == (MiniBackbone, QwenVL)
    for field in ("stop_ids", "max_position", "moving"):
        assert getattr(ours, field) == getattr(theirs, field)
    sessions = [Session.start(backbone, config) for backbone in (ours, theirs)]
    for seed in range(12):
        for session in sessions:
            session.watch(random_frames(seed))
    mine, other = (session.prefill("what colour was the star?") for session in sessions)
    if dtype == "float32":
        check_logits(sessions[1], mine, other)
    moved = Session.restore(sessions[0].make_state(), theirs)
    moved.watch(random_frames(13))
    assert moved.clock.steps == 13


def test_quantised_or_spread_it_goes_through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        QwenVL, "load", lambda path, name, config, placement: (name, placement.quantization)
    )
    assert load_backbone("protokv/mini", device="cpu", quantization="8bit") == (
        "protokv/mini",
        "8bit",
    )
