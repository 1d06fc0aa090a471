"""The names of transformers and torch that the engine leans on, and that nobody has promised.

This is the one list of them. The gate runs it with the oldest and the newest transformers.
"""

import inspect
from importlib import import_module

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from protokv.backbones.stream_cache import CACHE_ARGUMENT

NAMES = {
    "cache_utils": "Cache CacheLayerMixin DynamicLayer LinearAttentionCacheLayerMixin DynamicCache",
    "masking_utils": "sdpa_mask",
    "integrations.sdpa_attention": "sdpa_attention_forward",
    "models.qwen2_5_vl.modeling_qwen2_5_vl": "Qwen2_5_VLRotaryEmbedding",
    "models.llama.modeling_llama": "LlamaRotaryEmbedding apply_rotary_pos_emb",
    "models.gemma4.modeling_gemma4": "Gemma4TextRotaryEmbedding create_masks_for_vision_model",
}
LINEAR = "conv_states recurrent_states has_previous_state conv_kernel_size"


@pytest.mark.parametrize("module", list(NAMES))
def test_a_private_name_of_transformers_is_there(module: str) -> None:
    home = import_module(f"transformers.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(home, name)] == []


def test_layers_and_models_have_the_attributes_that_are_read() -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 32)
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    model = LlamaForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model.model(torch.ones(1, 3, dtype=torch.int64), **{CACHE_ARGUMENT: cache})
    (layer,) = cache.layers
    rotary = model.model.rotary_emb
    for held, names in (
        (layer, "keys values is_initialized is_sliding"),
        (config, "_attn_implementation"),
        (rotary, "attention_scaling"),
        (model, "_forward_pre_hooks _forward_hooks _non_persistent_buffers_set"),
    ):
        assert [name for name in names.split() if not hasattr(held, name)] == []


def test_sources_name_what_other_layers_hold() -> None:
    caches = inspect.getsource(import_module("transformers.cache_utils"))
    assert [name for name in LINEAR.split() if f"self.{name}" not in caches] == []
    assert "self.cumulative_length" in caches
    qwen = inspect.getsource(import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"))
    assert "def get_rope_index" in qwen
    assert "mrope_section" in qwen
