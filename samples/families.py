"""Print which families of models `protokv.Cache` serves: a tiny random model of each.

`python -m samples.families` goes through transformers' own `AutoModelForImageTextToText`, and
`python -m samples.families text` through `AutoModelForCausalLM`; names of families after it choose
some. A model is made whole, from the defaults of its family with few and small layers, and no
weights are loaded. Where the whole is not made, or takes no text without a picture, its text
decoder is tried alone. A family is served if text in steps and a question give the logits of one
forward and the same answer, and if bytes stay the same beyond the budget; else the table says why
not. It takes ten minutes on two cores.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from importlib import import_module
from typing import Any

import torch
import transformers

import protokv
from protokv.backbones.stream_cache import CACHE_ARGUMENT
from protokv.errors import ProtoKVError

# The head size is the one that default sections of M-RoPE are of.
TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "sliding_window": 40,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "mamba_num_heads": 8,
    "conv_L_cache": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "insert_layer_id": 0,
    "vision_hidden_size": 32,
    "projector_hidden_size": 32,
    "max_position_embeddings": 4096,
    "decoder_layers": 4,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 64,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "depth": 4,
    "num_heads": 2,
    "num_attention_heads": 2,
    "out_hidden_size": 256,
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
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
}
TOWERS = ("vision", "audio", "vit", "image", "visual", "tower")
LAYERS: int = TEXT["num_hidden_layers"]
# What a model needs that its defaults leave open.
WORDS = {"<image>": 8, "<|extra_200|>": 9}
ANGLES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [22, 22, 20]}
KINDS = ("full_attention", "sliding_attention")
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64}
GIVEN: dict[str, dict[str, Any]] = {
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "step3p7": {"text_config": {"sliding_window": 40}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 10, "audio_start_token_id": 11},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 10, "audio_start_token_id": 11},
    "diffusion_gemma": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    },
    "granite4_vision": {
        "vision_config": {"hidden_size": 64},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 1, 2, 3],
    },
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(KINDS, ANGLES)},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global"], 4]], "attention_layers": ["global"] * 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "gptj": {"rotary_dim": 64},
    "codegen": {"rotary_dim": 64},
    "chameleon": {"vocabulary_map": WORDS},
    "emu3": {"vocabulary_map": WORDS},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": ANGLES | {"mrope_section": [16, 16, 16, 16]},
        }
    },
    "cohere_compass": {"text_config": {"rope_parameters": dict.fromkeys(KINDS, ANGLES)}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"] * 2, "num_experts_per_tok": 2}
    },
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        }
    },
}
# Models that transformers makes by no class for all families.
CLASSES = {
    "evolla": ("evolla.modeling_evolla", "EvollaForProteinText2Text"),
    "kosmos_2_text_model": ("kosmos2.modeling_kosmos2", "Kosmos2TextForCausalLM"),
}
ANSWER: dict[str, Any] = {
    "max_new_tokens": 5,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}
TOLERANCE = 1e-3


def shrink(config: dict[str, Any], sizes: dict[str, Any], same: dict[int, int]) -> None:
    """Make a config and its parts small, where they have such a number.

    `same` has the small width for each wide one, which other parts name as well.
    """
    layers = config.get("num_hidden_layers")
    heads = config.get("num_attention_heads")
    alike = heads is not None and heads == config.get("num_key_value_heads")
    if isinstance(width := config.get("hidden_size"), int) and sizes and width >= 256:
        same = same | {width: sizes["hidden_size"]}
    for name, value in config.items():
        if isinstance(value, dict):
            inside = sizes is TOWER or any(what in name for what in TOWERS)
            part = TOWER if inside else sizes or TEXT
            shrink(value, part if "model_type" in value else {}, same)
        elif isinstance(value, list) and layers and len(value) == layers > LAYERS:
            kinds = list(dict.fromkeys(value)) if name == "layer_types" else value
            config[name] = (kinds * LAYERS)[:LAYERS]
        elif value and name in sizes and type(value) is type(sizes[name]):
            config[name] = sizes[name]
        elif type(value) is int and value in same:
            config[name] = same[value]
    if alike:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if "qk_rope_head_dim" in config:
        config.pop("head_dim", None)
    config.pop("per_layer_config", None)


def read_defaults(config_class: Any) -> Any:
    """Return the config of a family by its defaults, with a vision tower."""
    made = config_class()
    return config_class(vision_config={}) if getattr(made, "vision_config", 1) is None else made


def make(made: Any, auto_class: Any) -> Any:
    """Return a tiny model of a config."""
    config = made.to_dict()
    text = made.get_text_config(decoder=True)
    own = {
        text.attribute_map[name]: one for name, one in TEXT.items() if name in text.attribute_map
    }
    wide = getattr(text, "hidden_size", None)
    shrink(config, TEXT | own, {wide: TEXT["hidden_size"]} if wide else {})
    for name, value in GIVEN.get(made.model_type, {}).items():
        config[name] = config[name] | value if isinstance(config.get(name), dict) else value
    for number, name in enumerate(sorted(config)):
        counted = config[name] is None or type(config[name]) is int
        if name.endswith(("_id", "_token_index")) and name not in TEXT and counted:
            config[name] = 100 + number % 50
    for name in ("transformers_version", "model_type"):
        config.pop(name, None)
    torch.manual_seed(0)
    build = auto_class.from_config
    if made.model_type in CLASSES:
        file, name = CLASSES[made.model_type]
        build = getattr(import_module(f"transformers.models.{file}"), name)._from_config
    model = build(type(made)(**config), dtype=torch.float32).eval()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=g))
    for module in model.modules():
        section = getattr(module, "mrope_section", None)
        angles = getattr(module, "inv_freq", torch.empty(0)).numel()
        if isinstance(section, list) and angles not in (0, sum(section)):
            module.mrope_section = [part * angles // sum(section) for part in section]
    return model


def try_model(model: Any) -> str:
    """Return "served", or what is wrong. ProtoKVError: it is refused; other errors: its own."""
    cache = protokv.Cache(model, 400)
    ids = torch.randint(8, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids).logits[0, -1]
    theirs = model.generate(input_ids=ids, **ANSWER)[0, 40:]
    small = protokv.Cache(model, 24)
    sizes = []
    for one, steps in ((cache, 3), (small, 12)):
        for step in ids.repeat(1, 4)[:, : 10 * steps].split(10, 1):
            model(**one.step({"input_ids": step}))
            one.commit()
            sizes.append(one.nbytes)
    question = {"input_ids": ids[:, 30:]}
    own = model(**cache.question(question)).logits[0, -1]
    off = float((own - expected).abs().max() / expected.abs().max())
    if off > TOLERANCE:
        plain = transformers.DynamicCache(config=cache.decoder.config)
        for step in (*ids[:, :30].split(10, 1), ids[:, 30:]):
            theirs = model(input_ids=step, **{CACHE_ARGUMENT: plain}).logits[0, -1]
        if torch.allclose(own, theirs, atol=TOLERANCE, rtol=TOLERANCE):
            return (
                "as transformers' own cache, which gives other logits in steps than in one forward"
            )
        return f"WRONG: off by {off:.2g} of the largest logit"
    if model.generate(**cache.question(question), **ANSWER)[0, 10:].tolist() != theirs.tolist():
        return "WRONG: it answers otherwise"
    return "served" if sizes[-1] == sizes[-5] else "WRONG: bytes grow beyond the budget"


@torch.no_grad()
def try_family(config_class: Any, auto_class: Any) -> str:
    """Return "served", or the reason why not."""
    why = ""
    text_class = transformers.AutoModelForCausalLM
    for kind, said in ((auto_class, "served"), (text_class, "served: its text decoder alone")):
        try:
            made = read_defaults(config_class)
            if kind is not auto_class:
                made = made.get_text_config(decoder=True)
            found = try_model(make(made, kind))
            return said if found == "served" else found
        except ProtoKVError as error:
            name = r"\b[A-Z]\w+(Model|For\w+|Decoder|Attention)\b"
            return "refused: " + re.sub(name, "it", error.message)
        except Exception as error:
            why = why or f"not tried: no tiny model of it runs ({type(error).__name__})"
    return why


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    only = sys.argv[1:]
    auto_class: Any = transformers.AutoModelForImageTextToText
    if "text" in only:
        auto_class = transformers.AutoModelForCausalLM
    found = defaultdict(list)
    for config_class in auto_class._model_mapping:
        name = config_class.model_type
        if name in only or not set(only) - {"text"}:
            found[try_family(config_class, auto_class)].append(name)
    print("| what a cache does | families |\n|---|---|")
    for what, names in sorted(found.items(), key=lambda one: -len(one[1])):
        print(f"| {what} ({len(names)}) | {', '.join(sorted(names))} |")


if __name__ == "__main__":
    main()
