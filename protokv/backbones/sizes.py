"""Published models of the supported families, and what they take. Imports no torch and asks no hub.

Numbers of weights are those of transformers' models with the published configurations, and equal
those of the files. Qwen3.5-2B and larger mixtures than 35B-A3B are not listed: their configurations
were not found whole.
"""

from __future__ import annotations

from typing import NamedTuple

# Bytes of a weight. Linear layers in 4bit have one float32 scale for 64 weights.
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.0, "4bit": 0.5 + 4 / 64}
WEIGHT_DTYPES = tuple(_BYTES)
"""The forms of weights that are told; float16 takes what bfloat16 takes."""

# A step's activations and the memory of a stream, as a share of the weights and at least: an
# estimate.
_WORKING_SHARE = 0.2
_WORKING_BYTES = 1 << 30


class KnownModel(NamedTuple):
    """A published model."""

    name: str  # on the Hugging Face hub
    millions: int  # millions of weights
    # the part of these that quantisation leaves at 16 bits: embeddings, head, vision tower and
    # experts
    kept: int
    tokens: int  # the most visual tokens of a step

    def needed_bytes(self, dtype: str) -> int:
        """Return the bytes to watch and to answer with: the weights, and an estimate of the
        rest.
        """
        size = _BYTES[dtype]
        weights = 1e6 * ((self.millions - self.kept) * size + self.kept * max(size, 2.0))
        return round(weights + max(_WORKING_BYTES, weights * _WORKING_SHARE))


# In the package.
EMBEDDED_MODELS = (
    KnownModel("protokv/mini", 1, 0, 9),
    KnownModel("protokv/mini-order", 2, 0, 9),
    KnownModel("protokv/mini-words", 1, 0, 9),
)

KNOWN_MODELS = (
    KnownModel("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", 256, 150, 64),
    KnownModel("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", 507, 193, 64),
    KnownModel("HuggingFaceTB/SmolVLM2-2.2B-Instruct", 2_247, 636, 81),
    KnownModel("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", 894, 536, 196),
    KnownModel("llava-hf/llava-onevision-qwen2-7b-ov-hf", 8_030, 1_506, 196),
    KnownModel("Qwen/Qwen2-VL-2B-Instruct", 2_209, 899, 768),
    KnownModel("Qwen/Qwen2-VL-7B-Instruct", 8_291, 1_766, 768),
    KnownModel("Qwen/Qwen2.5-VL-3B-Instruct", 3_755, 980, 768),
    KnownModel("Qwen/Qwen2.5-VL-7B-Instruct", 8_292, 1_767, 768),
    KnownModel("Qwen/Qwen3-VL-2B-Instruct", 2_128, 718, 768),
    KnownModel("Qwen/Qwen3-VL-4B-Instruct", 4_438, 805, 768),
    KnownModel("Qwen/Qwen3-VL-8B-Instruct", 8_767, 1_821, 768),
    KnownModel("Qwen/Qwen3.5-0.8B", 853, 356, 768),
    KnownModel("Qwen/Qwen3.5-4B", 4_539, 970, 768),
    KnownModel("Qwen/Qwen3.5-9B", 9_410, 2_491, 768),
    KnownModel("Qwen/Qwen3.5-27B", 27_357, 3_030, 768),
    KnownModel("Qwen/Qwen3.5-35B-A3B", 35_107, 33_698, 768),
    KnownModel("OpenGVLab/InternVL3-1B-hf", 938, 580, 256),
    KnownModel("OpenGVLab/InternVL3-2B-hf", 2_089, 779, 256),
    KnownModel("OpenGVLab/InternVL3-8B-hf", 7_944, 1_419, 256),
    KnownModel("OpenGVLab/InternVL3_5-1B-HF", 1_061, 621, 256),
    KnownModel("OpenGVLab/InternVL3_5-2B-HF", 2_348, 939, 256),
    KnownModel("OpenGVLab/InternVL3_5-4B-HF", 4_732, 1_099, 256),
    KnownModel("OpenGVLab/InternVL3_5-8B-HF", 8_528, 1_583, 256),
    KnownModel("google/gemma-4-E2B-it", 5_104, 3_228, 70),
    KnownModel("google/gemma-4-E4B-it", 7_941, 3_968, 70),
    KnownModel("google/gemma-4-26B-A4B-it", 25_806, 24_150, 70),
    KnownModel("google/gemma-4-31B-it", 31_273, 1_986, 70),
)
