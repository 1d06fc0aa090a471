"""Tiny random models of the real architectures, written as a user's folder: the rows of the conformance matrix.

A family is one builder in `BUILDERS` and one function in `tests.backbones.upstream.INPUTS`, which makes the inputs of
transformers' own model from a question about a video.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

TEXT = "user assistant what who where is the a star ring red blue first last one two three ? ."
WORDS = TEXT.split()
END, TURN_END = "<|endoftext|>", "<|im_end|>"
QWEN_SPECIAL = [END, "<|im_start|>", TURN_END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
LLAVA_SPECIAL = [END, "<|im_start|>", TURN_END, "<image>", "<video>"]
# Media first and text behind it, whatever their order in the message, as the templates on the hub do.
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}"
    "{% for c in m['content'] if c['type'] == 'video' %}{{ '<video>' }}{% endfor %}"
    "{% for c in m['content'] if c['type'] == 'text' %}{{ '\n' + c['text'] }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA_SPECIAL = [END, "<|im_start|>", TURN_END, "<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>"]
GEMMA_TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video|>")
# The template of SmolVLM2 is transformers' own, as those on the hub know no video.
SMOLVLM_SPECIAL = [END, "<|im_start|>", TURN_END, "<image>", "<fake_token_around_image>", "<global-img>"]
SMOLVLM_SPECIAL += ["<end_of_utterance>"]
INTERNVL_SPECIAL = [END, "<|im_start|>", TURN_END, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
INTERNVL_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'video' %}{{ '<video>\n' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAYERS, HEAD_SIZE, VOCABULARY, LETTERS = 3, 16, 48, 64
# Qwen3-VL: its patch, the layers that its tower feeds, the pixels of all frames (4 to 9 tokens a step), time stamps.
PATCH, LAYERS_FED = 16, 2
QWEN3_SIZE = {"shortest_edge": 2 * 4 * 1024, "longest_edge": 2 * 9 * 1024}
STAMP = ["<", ">", "seconds", *"0123456789:"]


def write_tokenizer(
    folder: Path, special: Sequence[str], template: str | None, *, digits: bool = False
) -> dict[str, int]:
    """Write a word-level tokenizer with the family's control tokens; return its vocabulary.

    With `digits`, a number is one token a digit, so that time stamps differ in length.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*special, "<unk>", *WORDS, *(STAMP if digits else [])])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if digits:
        by_digit = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), by_digit])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token=TURN_END,
        pad_token=END,
        extra_special_tokens=[token for token in special if token not in (END, TURN_END)],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return vocabulary


def write_letters_tokenizer(folder: Path, special: Sequence[str], template: str) -> dict[str, int]:
    """Write a byte-level tokenizer with a token a letter, for families of which transformers knows the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz0123456789<>?._|ĠĊ:AFUY"
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END,
        extra_special_tokens=[token for token in special if token not in (END, TURN_END)],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return vocabulary


def save_random(model: torch.nn.Module, folder: Path) -> Path:
    """Save the model with weights so large that attention is far from uniform, where errors would hide."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms and most biases start as ones or zeros; whatever was drawn was drawn without our seed.
            constant = parameter.ndim == 1 and bool((parameter == parameter[0]).all())
            parameter.add_(0.1 * noise) if constant else parameter.copy_(0.25 * noise)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def text_settings(heads: int, kv_heads: int, max_positions: int, **rope: Any) -> dict[str, Any]:
    """Return the config of the language model of all tiny models, with this rotary embedding."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * HEAD_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


TEXT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def write_llama(folder: Path) -> Path:
    """Write a random Llama of a few thousand parameters. It is no row of the matrix: it reads text, not frames."""
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder, [END, "<|im_start|>", TURN_END], TEXT_TEMPLATE)
    return save_random(LlamaForCausalLM(LlamaConfig(**text_settings(4, 2, 4096))), folder)


def qwen_tokens(vocabulary: dict[str, int]) -> dict[str, int]:
    """Return the fields of a Qwen-VL config that name control tokens."""
    return {
        "image_token_id": vocabulary["<|image_pad|>"],
        "video_token_id": vocabulary["<|video_pad|>"],
        "vision_start_token_id": vocabulary["<|vision_start|>"],
        "vision_end_token_id": vocabulary["<|vision_end|>"],
    }


def write_qwen2_vl(folder: Path, **changes: int) -> Path:
    """Write a random Qwen2-VL of a few thousand parameters."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tower = {"embed_dim": 16, "hidden_size": changes.get("heads", 4) * HEAD_SIZE, "mlp_ratio": 2}
    return write_qwen(folder, Qwen2VLConfig, Qwen2VLForConditionalGeneration, tower, **changes)


def write_qwen2_5_vl(folder: Path, *, tokens_per_second: int = 2, **changes: int) -> Path:
    """Write a random Qwen2.5-VL of a few thousand parameters."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tower = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": changes.get("heads", 4) * HEAD_SIZE}
    tower |= {"tokens_per_second": tokens_per_second, "window_size": 56, "fullatt_block_indexes": [1]}
    return write_qwen(folder, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, tower, **changes)


def write_qwen(
    folder: Path,
    config: Any,
    model: Any,
    tower: dict[str, Any],
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 32768,
) -> Path:
    """Write a Qwen-VL with frames of 4 to 9 tokens."""
    vocabulary = write_tokenizer(folder, QWEN_SPECIAL, QWEN_TEMPLATE)
    limits = {"min_pixels": 3136, "max_pixels": 7056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(limits))
    made = config(
        text_config=text_settings(heads, kv_heads, max_positions, mrope_section=[4, 2, 2]),
        vision_config={"depth": 2, "num_heads": 2} | tower,
        tie_word_embeddings=True,
        **qwen_tokens(vocabulary),
    )
    return save_random(model(made), folder)


def write_qwen3_vl(
    folder: Path, *, heads: int = 4, kv_heads: int = 2, max_positions: int = 32768, experts: int = 0
) -> Path:
    """Write a random Qwen3-VL of a few thousand parameters; with experts, its mixture of experts."""
    import transformers

    vocabulary = write_tokenizer(folder, QWEN_SPECIAL, QWEN_TEMPLATE, digits=True)
    pixels = {"size": QWEN3_SIZE, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    statistics = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.2]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(pixels | statistics))
    text = text_settings(heads, kv_heads, max_positions, mrope_section=[4, 2, 2], mrope_interleaved=True)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if experts else {}
    name = "Qwen3VLMoe" if experts else "Qwen3VL"
    config = getattr(transformers, f"{name}Config")(
        text_config=text | {"head_dim": 16} | mixture,
        vision_config={
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": heads * 16,
            "patch_size": PATCH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": list(range(LAYERS_FED)),
        },
        tie_word_embeddings=True,
        **qwen_tokens(vocabulary),
    )
    return save_random(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)


def write_qwen3_5(folder: Path, *, heads: int = 4, max_positions: int = 32768, experts: int = 0) -> Path:
    """Write a random Qwen3.5 of a few thousand parameters; with experts, its mixture of experts.

    Of its four layers three are linear. Half of a key is rotated.
    """
    import transformers

    vocabulary = write_letters_tokenizer(folder, QWEN_SPECIAL, QWEN_TEMPLATE)
    pixels = {"size": QWEN3_SIZE, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    statistics = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.2]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(pixels | statistics))
    text = text_settings(heads, 2, max_positions, mrope_section=[2, 1, 1], partial_rotary_factor=0.5)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    mixture["shared_expert_intermediate_size"] = 24
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
    }
    own = {"num_hidden_layers": 4, "head_dim": HEAD_SIZE, "vocab_size": LETTERS}
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    config = getattr(transformers, f"{name}Config")(
        text_config=text | linear | own | (mixture if experts else {}),
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": heads * 16,
            "patch_size": PATCH,
            "num_position_embeddings": 16,
        },
        tie_word_embeddings=True,
        **qwen_tokens(vocabulary),
    )
    return save_random(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)


def write_gemma4(folder: Path, *, max_positions: int = 32768, window: int = 90, large: bool = False) -> Path:
    """Write a random Gemma 4 of a few thousand parameters, like the small published ones or like the large ones.

    Its six layers are sliding but for the third and the last. A window holds a frame and a half. In small ones the last
    two layers share and every layer gets an embedding of every token. Large ones are a mixture of experts, have fewer
    heads in full layers, whose values are their keys, and see frames both ways.
    """
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    vocabulary = write_tokenizer(folder, GEMMA_SPECIAL, GEMMA_TEMPLATE, digits=True)
    frames = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3}
    (folder / "processor_config.json").write_text(json.dumps({"video_processor": frames}))
    of_small = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
    of_large = {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }
    text = text_settings(4, 2, max_positions)
    del text["rope_parameters"]
    own = {
        "head_dim": HEAD_SIZE,
        "global_head_dim": 24,
        "num_hidden_layers": 6,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "sliding", "full")],
        "sliding_window": window,
        "final_logit_softcapping": 30.0,
    }
    config = Gemma4Config(
        text_config=text | own | (of_large if large else of_small),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 256,
        },
        boi_token_id=vocabulary["<|image>"],
        eoi_token_id=vocabulary["<image|>"],
        image_token_id=vocabulary["<|image|>"],
        video_token_id=vocabulary["<|video|>"],
        audio_token_id=vocabulary["<|audio|>"],
        tie_word_embeddings=True,
    )
    return save_random(Gemma4ForConditionalGeneration(config), folder)


def write_llava_onevision(
    folder: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 32768,
    image_size: int = 72,
    tower: str = "siglip_vision_model",
    feature_layer: int | list[int] = -1,
    select: str = "full",
) -> Path:
    """Write a random LLaVA-OneVision of a few thousand parameters.

    Frames of 72 pixels make 5 patches a side with 2 pixels to spare, pooled to 3: as odd as 384, 27 and 14.
    """
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    vocabulary = write_tokenizer(folder, LLAVA_SPECIAL, None)
    (folder / "chat_template.jinja").write_text(LLAVA_TEMPLATE)
    frames = {
        "size": {"height": image_size, "width": image_size},
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.3, 0.2],
        "video_processor_type": "LlavaOnevisionVideoProcessor",
    }
    processor = {
        "num_image_tokens": (image_size // 14) ** 2,
        "vision_feature_select_strategy": select,
        "video_processor": frames,
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2"} | text_settings(heads, kv_heads, max_positions),
        vision_config={
            "model_type": tower,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": image_size,
            "patch_size": 14,
        }
        | ({"vision_use_head": False} if tower.startswith("siglip") else {}),
        image_token_index=vocabulary["<image>"],
        video_token_index=vocabulary["<video>"],
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy=select,
        tie_word_embeddings=False,
    )
    return save_random(LlavaOnevisionForConditionalGeneration(config), folder)


def write_smolvlm(
    folder: Path, *, heads: int = 4, max_positions: int = 32768, image_size: int = 24, patch: int = 4, scale: int = 3
) -> Path:
    """Write a random SmolVLM2 of a few thousand parameters: 2 x 2 tokens a frame, of 6 x 6 patches."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    vocabulary = write_letters_tokenizer(folder, SMOLVLM_SPECIAL, TEXT_TEMPLATE)
    frames = {
        "size": {"longest_edge": 4 * image_size},
        "max_image_size": {"longest_edge": image_size},
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": image_size + 8}},
        "resample": 1,
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.3, 0.2],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(frames))
    config = SmolVLMConfig(
        text_config={"model_type": "llama"} | text_settings(heads, 2, max_positions) | {"vocab_size": LETTERS},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": image_size,
            "patch_size": patch,
        },
        image_token_id=vocabulary["<image>"],
        scale_factor=scale,
        tie_word_embeddings=False,
    )
    return save_random(SmolVLMForConditionalGeneration(config), folder)


def write_internvl(
    folder: Path,
    *,
    heads: int = 4,
    max_positions: int = 32768,
    image_size: int = 16,
    patch: int = 4,
    language: str = "qwen2",
) -> Path:
    """Write a random InternVL of a few thousand parameters: 2 x 2 tokens a frame, of 4 x 4 patches."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    vocabulary = write_letters_tokenizer(folder, INTERNVL_SPECIAL, INTERNVL_TEMPLATE)
    frames = {
        "size": {"height": image_size, "width": image_size},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    (folder / "video_preprocessor_config.json").write_text(json.dumps(frames))
    own = {"model_type": language, "vocab_size": LETTERS, "head_dim": HEAD_SIZE}
    config = InternVLConfig(
        text_config=text_settings(heads, 2, max_positions) | own,
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [image_size, image_size],
            "patch_size": [patch, patch],
            "attention_bias": True,
        },
        image_token_id=vocabulary["<IMG_CONTEXT>"],
        image_seq_length=(image_size // patch // 2) ** 2,
        tie_word_embeddings=False,
    )
    return save_random(InternVLForConditionalGeneration(config), folder)


BUILDERS: dict[str, Callable[..., Path]] = {
    "qwen2_vl": write_qwen2_vl,
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen3_vl": write_qwen3_vl,
    "qwen3_vl_moe": partial(write_qwen3_vl, experts=4),
    "qwen3_5": write_qwen3_5,
    "qwen3_5_moe": partial(write_qwen3_5, experts=4),
    "gemma4": write_gemma4,
    "llava_onevision": write_llava_onevision,
    "smolvlm": write_smolvlm,
    "internvl": write_internvl,
}
