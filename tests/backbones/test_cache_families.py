"""Families without a line of code of ours: equal logits before the first eviction, bounded bytes after, generation.

Their configs are shrunk as they stand in transformers. A family that this version lacks is skipped.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

import protokv
from protokv.core.stream_cache import ARGUMENT
from tests.backbones.test_cache import ANSWER, watch

TEXT: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "moe_intermediate_size": 32, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32, "num_local_experts": 4, "n_shared_experts": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    "sliding_window": 512, "global_head_dim": 64, "num_global_key_value_heads": 1, "conv_L_cache": 3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2, "num_heads": 2,
    "num_attention_heads": 2, "out_hidden_size": 128, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    "head_dim": 16, "image_size": 56, "num_key_value_heads": 2, "fullatt_block_indexes": [1],
}  # fmt: skip
LISTS = ("layer_types", "mlp_layer_types", "indexer_types")
FAMILIES = {
    "glm46v": {"mrope_section": [4, 6, 6]},
    "minicpmv4_6": {},
    "minicpmv4_7": {},
    "lfm3_vl": {},
    "gemma4_unified": {},
    "cosmos3_omni": {"mrope_section": [12, 10, 10]},
    "exaone4_5": {},
    "nemotron_h_omni": {},
}


def shrink(config: dict[str, Any], sizes: dict[str, Any]) -> None:
    for name, size in sizes.items():
        known = name in config and (name != "sliding_window" or config[name] is not None)
        if known and not (name in ("image_size", "moe_intermediate_size") and isinstance(config[name], list)):
            config[name] = size
    config.pop("per_layer_config", None)
    config.update({name: None for name in LISTS if isinstance(config.get(name), list)})


def tiny_model(family: str, way: str) -> Any:
    try:
        made = AutoConfig.for_model(family)
    except ValueError:
        pytest.skip("this version of transformers has no such family")
    config = made.to_dict()
    for name, part in config.items():
        if isinstance(part, dict) and name in ("text_config", "llm_config"):
            shrink(part, TEXT)
            if section := FAMILIES[family].get("mrope_section"):
                rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
                part["rope_parameters"] = rope | ({"partial_rotary_factor": 0.5} if family == "glm46v" else {})
        elif isinstance(part, dict) and any(what in name for what in ("vision", "audio", "vit")):
            shrink(part, TOWER)
    shrink(config, {name: size for name, size in TEXT.items() if name != "vocab_size"})
    for number, name in enumerate(sorted(config)):
        if name.endswith(("_token_id", "_token_index")) and name not in TEXT:
            config[name] = 100 + number % 50
    for name in ("transformers_version", "model_type"):
        config.pop(name, None)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(type(made)(**config), attn_implementation=way).eval()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=g))
    return model


@pytest.mark.parametrize("way", ["protokv", *(["sdpa"] if ARGUMENT == "cache" else [])])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family_without_code_of_ours_is_served(family: str, way: str) -> None:
    model = tiny_model(family, way)
    g = torch.Generator().manual_seed(1)
    stream, question = torch.randint(3, 90, (1, 400), generator=g), torch.randint(3, 90, (1, 7), generator=g)
    cache, plain = protokv.Cache(model, 400), DynamicCache(config=model.config)
    for ids in stream[:, :60].split(10, 1):
        expected = model(input_ids=ids, **{ARGUMENT: plain}).logits
        torch.testing.assert_close(watch(model, cache, [ids]), expected[0], atol=5e-4, rtol=5e-4)
    whole = torch.cat((stream[:, :60], question), 1)
    theirs = model.generate(input_ids=whole, **{ARGUMENT: plain}, **ANSWER)[0, -5:]
    ours = model.generate(**cache.question({"input_ids": question}), **ANSWER)[0, -5:]
    assert torch.equal(ours, theirs)
    small, sizes = protokv.Cache(model, 24), []
    for ids in stream.repeat(1, 2).split(20, 1):
        watch(model, small, [ids])
        sizes.append(small.nbytes)
    # The window of sliding layers is full by then.
    assert sizes[-1] == sizes[-8]
    assert len(model.generate(**small.question({"input_ids": question}), **ANSWER)[0]) == 12
