"""Words in training videos stand where a session puts them, and the new layers bind names to shapes
by themselves.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.backbones import load_backbone
from protokv.core.step import StepTokens
from protokv.memories import FullConfig
from protokv.mini.backbone import MiniBackbone
from protokv.stream.session import Session
from protokv.words.transcript import Transcript
from samples.training.forward import read_questions
from samples.training.sparse import SparseVideo
from samples.training.speech_batches import encode_caption, make_speech_batch, speak
from samples.training.speech_surgery import BINDING_LAYER, NAMING_LAYER, bind_names
from samples.training.stages import save_atomically
from samples.training.surgery import insert_layers, tell_words_apart
from samples.training.train_words import SPEAK, WordsTrainer, make_words_curriculum, train_words
from samples.training.visual_tokens import N_PREFIX, VisualTokens
from samples.training.vocabulary import encode, token_ids
from samples.worlds.phrases import SPEECH_TYPES
from samples.worlds.pictures import SHAPES
from samples.worlds.speech import NAMES, SMALL_TALK, Caption, say_owner


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("protokv/mini-words", device="cpu")


@given(st.lists(st.sampled_from([None, *SMALL_TALK]), min_size=1, max_size=9))
def test_words_of_a_training_video_stand_where_a_session_puts_them(backbone, lines):
    span = len(lines)
    said = [Caption(second, text) for second, text in enumerate(lines) if text]
    times = np.repeat(np.arange(span), 9)
    whole = SparseVideo(times * 0, times, np.tile(np.arange(9), span), times >= 0, [], span)
    spoken = speak(whole, said, 0)
    session = Session.start(backbone, FullConfig(budget=4096), fps=2.0, attachments=[Transcript()])
    positions = []
    ids = []
    for second, text in enumerate(lines):
        step = backbone.add_words(
            StepTokens(torch.zeros(9, 128, dtype=backbone.dtype), (3, 3)), [text] if text else []
        )
        positions += session.position_steps([step], [float(second)])[0].positions.tolist()
        ids += [-1] * 9 + (backbone.words_ids(text) if text else [])
        session.take([step], [float(second)])
    assert spoken.positions.T.tolist() == positions
    assert spoken.ids.tolist() == ids
    assert spoken.asked_at == session.clock.next_position


def test_the_new_layers_bind_names_to_shapes_and_shapes_to_names_before_any_training():
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        MiniBackbone.folder("protokv/mini"), dtype=torch.float32
    )
    model = insert_layers(model.state_dict(), 1, inserted=(BINDING_LAYER, NAMING_LAYER))
    embedding = model.model.language_model.embed_tokens.weight.detach()
    tell_words_apart(embedding, 1, "content", "words")
    rng = np.random.default_rng(2)
    generator = torch.Generator().manual_seed(2)
    # Features of real pictures lie in few dimensions, too.
    basis = torch.randn(24, 128, generator=generator) / 2
    bind_names(model, torch.randn(400, 24, generator=generator) @ basis)
    n = len(NAMES)
    times = np.repeat(np.arange(2 * n), 9)
    whole = SparseVideo(times * 0, times, np.tile(np.arange(9), 2 * n), times >= 0, [], 2 * n)
    spoken = speak(whole, [say_owner(rng, 2 * i, (3 * i + 1) % n, i) for i in range(n)], 0)
    video = spoken.video
    tokens = VisualTokens(
        torch.randn(1, len(video.times), 24, generator=generator) @ basis,
        *(torch.from_numpy(one)[None] for one in (video.times, video.cells)),
        torch.tensor([spoken.asked_at - N_PREFIX]),
        ids=torch.from_numpy(spoken.ids)[None],
        positions=torch.from_numpy(spoken.positions)[:, None],
    )
    ids = token_ids("words")
    plain = embedding[[ids[name.lower()] for name in NAMES]].mean(0)
    asked = {"What belongs to {}?": (NAMES, SHAPES, 1), "Who owns the {}?": (SHAPES, NAMES, 3)}
    for text, (words, answers, inverse) in asked.items():
        questions = torch.tensor(
            [[encode(f"<|vision_end|> {text.format(word)}", "words") for word in words]]
        )
        with torch.no_grad():
            _, tapped = read_questions(model, tokens, questions, questions < 0, (2,), 2)
        moved = tapped[2][0, -questions[0].numel() :].view(n, -1, 128)[:, -2] - plain
        meant = embedding[[ids[word.lower()] for word in answers]]
        alike = torch.cosine_similarity(moved[:, None], (meant - meant.mean(0))[None], dim=-1)
        expected = [(3 * i + 1) % n if inverse == 1 else (i - 1) * inverse % n for i in range(n)]
        assert (
            sum(a == b for a, b in zip(alike.argmax(1).tolist(), expected, strict=True)) >= n - 1
        ), text


def test_who_is_asked_about_is_named_in_the_video_and_names_are_never_hidden(composer):
    stage = replace(SPEAK, tokens=700, weights=dict.fromkeys(SPEECH_TYPES, 1.0), drop=1.0)
    batch = make_speech_batch(np.random.default_rng(4), composer, stage, 0.5)
    tokens = batch.tokens
    names = torch.tensor([token_ids("words")[name.lower()] for name in NAMES])
    named = torch.isin(tokens.ids, names)
    assert named.any()
    assert tokens.seen[named].all()
    assert (tokens.bias[tokens.ids >= 0] == 0).all()
    for said, asked in zip(tokens.ids, batch.questions, strict=True):
        assert torch.isin(asked[torch.isin(asked, names)], said).all()


def test_a_caption_is_encoded_as_the_backbone_encodes_it(backbone):
    for text in ("The owner of the star is Mara", "The bar is Omar's", *SMALL_TALK):
        assert backbone.words_ids(text) == encode_caption(text).tolist()


@pytest.mark.slow
def test_a_tiny_run_ends_in_a_checkpoint_that_knows_the_words(bank, tmp_path, monkeypatch):
    monkeypatch.setattr(WordsTrainer, "held_out_batches", 1)
    monkeypatch.setattr(WordsTrainer, "whole", replace(WordsTrainer.whole, tokens=300))
    save_atomically(bank.tensors(), tmp_path / "bank.safetensors")
    made = train_words(
        tmp_path, 1, [replace(stage, steps=2, tokens=300) for stage in make_words_curriculum()]
    )
    trained = load_backbone(str(made), device="cpu")
    assert trained.unknown_words("Who owns the star, Mara?") == []
    assert trained.layers == load_backbone("protokv/mini-words", device="cpu").layers
