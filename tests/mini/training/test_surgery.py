"""New layers change nothing until they are trained, and begin by looking where they should."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini import weights_folder
from protokv.mini.training.forward import compute_logits, make_rotary_tables, turn_pairs
from protokv.mini.training.surgery import LOOK_BACK_LAYER, SECTIONS, insert_layers, look_back, tell_words_apart
from protokv.mini.training.visual_tokens import show_whole_steps
from protokv.mini.vocabulary import token_ids, words
from tests.tolerance import forward_terms, near


@pytest.fixture(scope="module")
def shipped():
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(weights_folder(), dtype=torch.float32)


@pytest.fixture
def longer(shipped):
    model = insert_layers(shipped.state_dict(), 1)
    tell_words_apart(model.model.language_model.embed_tokens.weight, 1, "content", "order")
    look_back(model)
    return model


def test_a_longer_model_says_what_the_shipped_one_says_with_its_pairs_divided_anew(shipped, longer):
    generator = torch.Generator().manual_seed(0)
    features = 2.5 * torch.randn(2, 45, 128, generator=generator)
    tokens = show_whole_steps(
        features, torch.tensor([[0, 1, 2, 7, 11], [640, 641, 650, 651, 699]]), torch.tensor([12, 703])
    )
    questions = torch.randint(0, len(words()), (2, 3, 9), generator=generator)
    everything = torch.ones_like(questions, dtype=torch.bool)
    rope = shipped.config.text_config.rope_parameters
    own = rope["mrope_section"]
    with torch.no_grad():
        rope["mrope_section"] = list(SECTIONS)
        before = compute_logits(shipped, tokens, questions, everything)
        rope["mrope_section"] = own
        after = compute_logits(longer, tokens, questions, everything)
    assert len(longer.model.language_model.layers) == 6
    known = slice(0, len(words()))
    expected = before[:, known]
    terms = forward_terms(6, 128, tokens.times.shape[1] + questions.shape[-1])
    torch.testing.assert_close(after[:, known], expected, **near(expected, terms))


def test_words_about_order_are_told_apart_and_others_stay(shipped, longer):
    old, new = (m.model.language_model.embed_tokens.weight.detach() for m in (shipped, longer))
    ids = token_ids("order")
    pair = [ids["before"], ids["after"]]
    alike, apart = (torch.nn.functional.cosine_similarity(*table[pair], dim=0) for table in (old, new))
    assert alike > 0.99
    assert apart < 0.9
    assert torch.equal(old[: len(words())], new[: len(words())])
    assert longer.lm_head.weight.data_ptr() == longer.model.language_model.embed_tokens.weight.data_ptr()
    later = new.clone()
    tell_words_apart(later, 1, "order", "time")
    assert (later != new).any(1).nonzero().flatten().tolist() == [token_ids("time")["times"]]


def test_a_layer_that_looks_back_attends_three_and_four_tokens_before(longer):
    attention = longer.model.language_model.layers[LOOK_BACK_LAYER].self_attn
    place = torch.arange(50, 62).expand(3, 1, 12)
    turned = make_rotary_tables(longer, place)
    q, k = (
        turn_pairs(projection.bias.detach().view(1, 1, -1, 32), *turned)[0]
        for projection in (attention.q_proj, attention.k_proj)
    )
    for head, offset in enumerate((3, 3, 4, 4)):
        scores = q[-1, head] @ k[:, head // 2].T
        assert int(scores.argmax()) == 11 - offset
        assert scores.softmax(-1).max() > 0.6


def test_weights_of_another_model_are_refused(shipped):
    state = shipped.state_dict()
    del state["model.language_model.norm.weight"]
    with pytest.raises(ValueError, match="norm"):
        insert_layers(state, 1)
