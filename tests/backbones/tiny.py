"""Tiny random models of the real architectures, written as a user's folder: the rows of the
conformance matrix.

A family is one builder in `BUILDERS` and one function in `tests.backbones.upstream.INPUTS`, which
makes the inputs of transformers' own model from a question about a video.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from protokv.texts import JsonObject

TEXT = "user assistant what who where is the a star ring red blue first last one two three ? ."
WORDS = TEXT.split()
END = "<|endoftext|>"
TURN_END = "<|im_end|>"
QWEN_SPECIAL = [
    END,
    "<|im_start|>",
    TURN_END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
LLAVA_SPECIAL = [END, "<|im_start|>", TURN_END, "<image>", "<video>"]
# Media first and text behind it, whatever their order in the message, as the templates on the hub
# do.
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}"
    "{% for c in m['content'] if c['type'] == 'video' %}{{ '<video>' }}{% endfor %}"
    "{% for c in m['content'] if c['type'] == 'text' %}{{ '\n' + c['text'] }}{% endfor %}"
    "{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA_SPECIAL = [
    END,
    "<|im_start|>",
    TURN_END,
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|video|>",
    "<|audio|>",
]
GEMMA_TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video|>")
# The template of SmolVLM2 is transformers' own, as those on the hub know no video.
SMOLVLM_SPECIAL = [
    END,
    "<|im_start|>",
    TURN_END,
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
]
INTERNVL_SPECIAL = [END, "<|im_start|>", TURN_END, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
INTERNVL_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'video' %}{{ '<video>\n' }}{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAYERS = 3
HEAD_SIZE = 16
VOCABULARY = 48
LETTERS = 64
# Qwen3-VL: its patch, the layers that its tower feeds, the pixels of all frames (4 to 9 tokens a
# step), time stamps.
PATCH = 16
LAYERS_FED = 2
QWEN3_SIZE = {"shortest_edge": 2 * 4 * 1024, "longest_edge": 2 * 9 * 1024}
STAMP = ["<", ">", "seconds", *"0123456789:"]
STATISTICS = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.2]}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def write_tokenizer(
    folder: Path, special: Sequence[str], template: str | None, *, digits: bool = False
) -> dict[str, int]:
    """Write a word-level tokenizer with the family's control tokens; return its vocabulary.

    With `digits`, a number is one token a digit, so that time stamps differ in length.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {
        word: i for i, word in enumerate([*special, "<unk>", *WORDS, *(STAMP if digits else [])])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    splits = [
        pre_tokenizers.Whitespace(),
        *([pre_tokenizers.Digits(individual_digits=True)] if digits else []),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return save_tokenizer(folder, tokenizer, special, template, unk_token="<unk>")


def write_letters_tokenizer(folder: Path, special: Sequence[str], template: str) -> dict[str, int]:
    """Write a byte-level tokenizer with a token a letter, for families of which transformers knows
    the tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz0123456789<>?._|ĠĊ:AFUY"
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate([*special, *letters])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return save_tokenizer(folder, tokenizer, special, template)


def save_tokenizer(
    folder: Path, tokenizer: Any, special: Sequence[str], template: str | None, **named: str
) -> dict[str, int]:
    from transformers import PreTrainedTokenizerFast

    extra = [token for token in special if token not in (END, TURN_END)]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END,
        extra_special_tokens=extra,
        **named,
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def save_random(model: torch.nn.Module, folder: Path) -> Path:
    """Save the model with weights so large that attention is far from uniform, where errors would
    hide.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms and most biases start as ones or zeros; whatever was drawn was drawn without our
            # seed.
            constant = parameter.ndim == 1 and bool((parameter == parameter[0]).all())
            parameter.add_(0.1 * noise) if constant else parameter.copy_(0.25 * noise)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def text_settings(heads: int = 4, kv_heads: int = 2, **rope: Any) -> JsonObject:
    """Return the config of the language model of all tiny models, with this rotary embedding."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * HEAD_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


TEXT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def write_llama(folder: Path) -> Path:
    """Write a random Llama of a few thousand parameters. It is no row of the matrix: it reads text,
    not frames.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder, [END, "<|im_start|>", TURN_END], TEXT_TEMPLATE)
    return save_random(LlamaForCausalLM(LlamaConfig(**text_settings())), folder)


def save_model(name: str, folder: Path, **parts: Any) -> Path:
    """Save a random model of the transformers class of this name, with a config of these parts."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**parts)
    return save_random(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)


def write_json(folder: Path, name: str, content: JsonObject) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


def qwen_tokens(vocabulary: dict[str, int]) -> JsonObject:
    """Return the fields of a Qwen-VL config that name control tokens, and that the head is the
    embedding.
    """
    named = {
        "image": "image_pad",
        "video": "video_pad",
        "vision_start": "vision_start",
        "vision_end": "vision_end",
    }
    tokens = {f"{field}_token_id": vocabulary[f"<|{token}|>"] for field, token in named.items()}
    return tokens | {"tie_word_embeddings": True}


def write_qwen2_vl(folder: Path) -> Path:
    return write_qwen(
        folder, "Qwen2VL", {"embed_dim": 16, "hidden_size": 4 * HEAD_SIZE, "mlp_ratio": 2}
    )


def write_qwen2_5_vl(folder: Path, heads: int = 4, kv_heads: int = 2, **text: Any) -> Path:
    tower: JsonObject = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "out_hidden_size": heads * HEAD_SIZE,
        "tokens_per_second": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    return write_qwen(folder, "Qwen2_5_VL", tower, heads, kv_heads, **text)


def write_qwen(
    folder: Path, name: str, tower: JsonObject, heads: int = 4, kv_heads: int = 2, **text: Any
) -> Path:
    """Write a random Qwen-VL of a few thousand parameters, with frames of 4 to 9 tokens."""
    vocabulary = write_tokenizer(folder, QWEN_SPECIAL, QWEN_TEMPLATE)
    limits = {
        "min_pixels": 3136,
        "max_pixels": 7056,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    write_json(folder, "preprocessor_config", limits)
    text = text_settings(heads, kv_heads, mrope_section=[4, 2, 2]) | text
    vision = {"depth": 2, "num_heads": 2} | tower
    return save_model(
        name, folder, text_config=text, vision_config=vision, **qwen_tokens(vocabulary)
    )


def write_qwen3_vl(folder: Path, *, experts: int = 0) -> Path:
    """Write a random Qwen3-VL of a few thousand parameters; with experts, its mixture of
    experts.
    """
    vocabulary = write_tokenizer(folder, QWEN_SPECIAL, QWEN_TEMPLATE, digits=True)
    text = text_settings(mrope_section=[4, 2, 2], mrope_interleaved=True) | {"head_dim": HEAD_SIZE}
    vision = {"depth": 3, "deepstack_visual_indexes": list(range(LAYERS_FED))}
    return write_qwen3(
        folder, "Qwen3VLMoe" if experts else "Qwen3VL", text, vision, vocabulary, experts
    )


def write_qwen3_5(folder: Path, *, experts: int = 0) -> Path:
    """Write a random Qwen3.5 of a few thousand parameters; with experts, its mixture of experts.

    Of its four layers three are linear. Half of a key is rotated.
    """
    vocabulary = write_letters_tokenizer(folder, QWEN_SPECIAL, QWEN_TEMPLATE)
    text = text_settings(mrope_section=[2, 1, 1], partial_rotary_factor=0.5)
    text |= {
        "num_hidden_layers": 4,
        "head_dim": HEAD_SIZE,
        "vocab_size": LETTERS,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
    }
    text |= {"shared_expert_intermediate_size": 24} if experts else {}
    return write_qwen3(
        folder, "Qwen3_5Moe" if experts else "Qwen3_5", text, {"depth": 2}, vocabulary, experts
    )


def write_qwen3(
    folder: Path,
    name: str,
    text: JsonObject,
    vision: JsonObject,
    vocabulary: dict[str, int],
    experts: int,
) -> Path:
    pixels = {
        "size": QWEN3_SIZE,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **STATISTICS,
    }
    write_json(folder, "video_preprocessor_config", pixels)
    mixture = (
        {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        if experts
        else {}
    )
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH}
    tower |= {"num_position_embeddings": 16, "out_hidden_size": 4 * HEAD_SIZE} | vision
    return save_model(
        name, folder, text_config=text | mixture, vision_config=tower, **qwen_tokens(vocabulary)
    )


def write_gemma4(folder: Path, *, window: int = 90, large: bool = False) -> Path:
    """Write a random Gemma 4 of a few thousand parameters, like the small published ones or like
    the large ones.

    Its six layers are sliding but for the third and the last. A window holds a frame and a half. In
    small ones the last two layers share and every layer gets an embedding of every token. Large
    ones are a mixture of experts, have fewer heads in full layers, whose values are their keys, and
    see frames both ways.
    """
    vocabulary = write_tokenizer(folder, GEMMA_SPECIAL, GEMMA_TEMPLATE, digits=True)
    frames = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3}
    write_json(folder, "processor_config", {"video_processor": frames})
    kinds = ("sliding", "sliding", "full", "sliding", "sliding", "full")
    text = text_settings() | {
        "head_dim": HEAD_SIZE,
        "global_head_dim": 24,
        "num_hidden_layers": 6,
        "sliding_window": window,
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "final_logit_softcapping": 30.0,
    }
    del text["rope_parameters"]
    if large:
        text |= {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        }
    else:
        text |= {
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        }
    vision = TOWER | {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 256,
    }
    named = {
        "boi": "<|image>",
        "eoi": "<image|>",
        "image": "<|image|>",
        "video": "<|video|>",
        "audio": "<|audio|>",
    }
    tokens = {f"{field}_token_id": vocabulary[token] for field, token in named.items()}
    return save_model(
        "Gemma4", folder, text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens
    )


def write_llava_onevision(
    folder: Path,
    *,
    image_size: int = 72,
    tower: str = "siglip_vision_model",
    feature_layer: int | list[int] = -1,
    select: str = "full",
) -> Path:
    """Write a random LLaVA-OneVision of a few thousand parameters.

    Frames of 72 pixels make 5 patches a side with 2 pixels to spare, pooled to 3: as odd as 384, 27
    and 14.
    """
    vocabulary = write_tokenizer(folder, LLAVA_SPECIAL, None)
    (folder / "chat_template.jinja").write_text(LLAVA_TEMPLATE)
    frames = {
        "size": {"height": image_size, "width": image_size},
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    frames |= STATISTICS | {"video_processor_type": "LlavaOnevisionVideoProcessor"}
    processor = {
        "num_image_tokens": (image_size // 14) ** 2,
        "vision_feature_select_strategy": select,
    }
    write_json(folder, "processor_config", processor | {"video_processor": frames})
    vision = TOWER | {"model_type": tower, "image_size": image_size, "patch_size": 14}
    return save_model(
        "LlavaOnevision",
        folder,
        text_config={"model_type": "qwen2"} | text_settings(),
        vision_config=vision | ({"vision_use_head": False} if tower.startswith("siglip") else {}),
        image_token_index=vocabulary["<image>"],
        video_token_index=vocabulary["<video>"],
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy=select,
        tie_word_embeddings=False,
    )


def write_smolvlm(folder: Path, *, image_size: int = 24, patch: int = 4, scale: int = 3) -> Path:
    """Write a random SmolVLM2 of a few thousand parameters: 2 x 2 tokens a frame, of 6 x 6
    patches.
    """
    vocabulary = write_letters_tokenizer(folder, SMOLVLM_SPECIAL, TEXT_TEMPLATE)
    frames = {
        "size": {"longest_edge": 4 * image_size},
        "max_image_size": {"longest_edge": image_size},
        "resample": 1,
    }
    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": image_size + 8}}
    write_json(folder, "preprocessor_config", frames | STATISTICS | {"video_sampling": sampling})
    return save_model(
        "SmolVLM",
        folder,
        text_config={"model_type": "llama"} | text_settings() | {"vocab_size": LETTERS},
        vision_config=TOWER | {"image_size": image_size, "patch_size": patch},
        image_token_id=vocabulary["<image>"],
        scale_factor=scale,
        tie_word_embeddings=False,
    )


def write_internvl(
    folder: Path, *, image_size: int = 16, patch: int = 4, language: str = "qwen2"
) -> Path:
    """Write a random InternVL of a few thousand parameters: 2 x 2 tokens a frame, of 4 x 4
    patches.
    """
    vocabulary = write_letters_tokenizer(folder, INTERNVL_SPECIAL, INTERNVL_TEMPLATE)
    frames = {"size": {"height": image_size, "width": image_size}}
    statistics = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    write_json(folder, "video_preprocessor_config", frames | statistics)
    own = {"model_type": language, "vocab_size": LETTERS, "head_dim": HEAD_SIZE}
    sizes = {
        "image_size": [image_size, image_size],
        "patch_size": [patch, patch],
        "attention_bias": True,
    }
    return save_model(
        "InternVL",
        folder,
        text_config=text_settings() | own,
        vision_config=TOWER | sizes,
        image_token_id=vocabulary["<IMG_CONTEXT>"],
        image_seq_length=(image_size // patch // 2) ** 2,
        tie_word_embeddings=False,
    )


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
