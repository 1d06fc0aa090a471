"""Families without a line of code of ours: pictures in steps give the logits and answers of all in
one call.

Then bytes are bounded. Configs are shrunk as they stand in transformers; a family that this version
lacks is skipped.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

import protokv
from protokv.core.rotary import rotate
from tests.backbones.test_cache import ANSWER, NEAR, WAYS, answer, texts, watch

TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "sliding_window": 40,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "conv_L_cache": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "insert_layer_id": 0,
    "vision_hidden_size": 32,
    "projector_hidden_size": 32,
    "mamba_num_heads": 8,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 32,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_heads": 2,
    "num_attention_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
    "head_dim": 16,
    "image_size": 56,
    "num_key_value_heads": 2,
    "fullatt_block_indexes": [1],
    "patch_size": 4,
    "mm_embed_dim": 32,
    "mm_posemb_size": 64,
    "output_proj_dims": 32,
    "max_img_size": 64,
}
LISTS = ("layer_types", "mlp_layer_types", "indexer_types")
FAMILIES = [
    "glm4v",
    "glm46v",
    "minicpmv4_6",
    "minicpmv4_7",
    "lfm3_vl",
    "gemma4_unified",
    "cosmos3_omni",
    "exaone4_5",
]
FAMILIES += ["nemotron_h_omni"]
SECTIONS = {"glm4v": [4, 6, 6], "glm46v": [4, 6, 6], "cosmos3_omni": [12, 10, 10]}
# Families whose processor tells which tokens are of a picture.
TYPED = ("glm4v", "glm46v", "minicpmv4_7", "gemma4_unified", "cosmos3_omni")
COUNT = 5


def shrink(config: dict[str, Any], sizes: dict[str, Any]) -> None:
    for name, size in sizes.items():
        known = name in config and (name != "sliding_window" or config[name] is not None)
        if known and not (
            name in ("image_size", "moe_intermediate_size") and isinstance(config[name], list)
        ):
            config[name] = size
    config.pop("per_layer_config", None)
    config.update({name: None for name in LISTS if isinstance(config.get(name), list)})


def tiny_model(family: str, way: str) -> Any:
    try:
        made = AutoConfig.for_model(
            family, **({"vision_config": {}} if family == "gemma4_unified" else {})
        )
    except ValueError:
        pytest.skip("this version of transformers has no such family")
    config = made.to_dict()
    for name, part in config.items():
        if isinstance(part, dict) and name in ("text_config", "llm_config"):
            shrink(part, TEXT)
            if section := SECTIONS.get(family):
                rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
                part["rope_parameters"] = rope | (
                    {"partial_rotary_factor": 0.5} if family.startswith("glm") else {}
                )
        elif isinstance(part, dict) and any(what in name for what in ("vision", "audio", "vit")):
            shrink(part, TOWER)
    shrink(config, {name: size for name, size in TEXT.items() if name != "vocab_size"})
    for number, name in enumerate(sorted(config)):
        if name.endswith(("_id", "_token_index")) and name not in TEXT:
            config[name] = 100 + number % 50
    for name in ("transformers_version", "model_type"):
        config.pop(name, None)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        type(made)(**config), attn_implementation=way
    ).eval()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=g))
    return model


def make_steps(family: str, config: Any) -> list[dict[str, Tensor]]:
    """Return steps of two words and a picture of 4 x 8 patches, as the processor of the family
    gives them.
    """
    tower = config.vision_config
    n = 32
    grid = torch.tensor([[4, 8]])
    tokens = n // 4
    sizes = {"image_grid_hw": grid}
    shape: tuple[int, ...] = (n, 3 * 4**2 * getattr(tower, "temporal_patch_size", 1))
    if family.startswith("minicpm"):
        tokens = n // 16
        shape = (1, 3, 4, n * 4)
        sizes = {"target_sizes": grid}
    elif family == "gemma4_unified":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(8))[None]
        tokens = n
        shape = (1, n, 3 * tower.model_patch_size**2)
        sizes = {"image_position_ids": places}
    elif family != "nemotron_h_omni":
        sizes = {"image_grid_thw": torch.tensor([[1, 4, 8]])}
    marks = [getattr(config, name, 9) for name in ("image_start_id", "image_end_id")]
    ids = torch.tensor([[10, 11, marks[0], *[config.image_token_id] * tokens, marks[1]]])
    sizes |= {"mm_token_type_ids": (ids == config.image_token_id).int()} if family in TYPED else {}
    return [{"input_ids": ids, "pixel_values": torch.rand(shape), **sizes} for _ in range(COUNT)]


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family_without_code_of_ours_is_served(family: str, way: str) -> None:
    model = tiny_model(family, way)
    steps = make_steps(family, model.config)
    question = torch.randint(3, 90, (1, 7))
    along = {
        "input_ids": 1,
        "mm_token_type_ids": 1,
        "pixel_values": 3 if family.startswith("minicpm") else 0,
    }
    whole = {
        name: torch.cat([step[name] for step in steps], along.get(name, 0)) for name in steps[0]
    }
    expected = model(**whole).logits[0]
    whole["input_ids"] = torch.cat((whole["input_ids"], question), 1)
    if family in TYPED:
        whole["mm_token_type_ids"] = torch.nn.functional.pad(whole["mm_token_type_ids"], (0, 7))
    theirs = answer(model, whole)
    cache = protokv.Cache(model, memory="full")
    small = protokv.Cache(model, 24)
    sizes = []
    found = []
    asked = []
    for step in steps:
        asked.append(model(**cache.question(step)).logits[0])
        found.append(model(**cache.step(step)).logits[0])
        cache.commit()
    for logits in (asked, found):
        torch.testing.assert_close(torch.cat(logits), expected, atol=5e-4, rtol=5e-4)
    assert answer(model, cache.question({"input_ids": question})) == theirs
    for step in steps * 4:
        model(**small.step(step))
        small.commit()
        sizes.append(small.nbytes)
    # The window of sliding layers is full by then.
    assert sizes[-1] == sizes[-8]
    assert len(answer(model, small.question({"input_ids": question}))) == ANSWER["max_new_tokens"]


@torch.no_grad()
def test_a_model_that_pairs_neighbours_is_read_in_the_order_of_halves() -> None:
    from transformers.models.glm4v.modeling_glm4v import apply_rotary_pos_emb

    models = [tiny_model("glm46v", way) for way in WAYS[:2]]
    # Past the first eviction both ways read the same slots; a centre in 8 bits may differ by a
    # unit.
    found = [watch(model, protokv.Cache(model, 24, center_bits=32), texts(12)) for model in models]
    torch.testing.assert_close(found[0], found[-1], **NEAR)
    decoder: Any = protokv.Cache(models[0], 24).decoder
    keys = torch.randn(1, 1, 5, 64)
    positions = torch.arange(5)[:, None].expand(-1, 3) + 100
    cos_and_sin = models[0].model.language_model.rotary_emb(keys, positions.T[:, None])
    theirs = apply_rotary_pos_emb(keys, keys, *cos_and_sin)[1]
    torch.testing.assert_close(
        decoder.to_halves(theirs), rotate(decoder.to_halves(keys), *decoder.angles(positions))
    )
