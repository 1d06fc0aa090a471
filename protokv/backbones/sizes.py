"""Published models of the supported families, and the memory that they take. Imports no torch and asks no hub.

The counts are those of the checkpoints' own files. They equal the counts of transformers' models with the published
configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Bytes of a weight. Linear layers in 4bit have one float32 scale for 64 weights.
_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "8bit": 1.0, "4bit": 0.5 + 4 / 64}
# A step's activations and the memory of a stream, as a share of the weights and at least: an estimate.
_WORKING_SHARE: Final = 0.2
_WORKING_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published model.

    Attributes:
        name: on the Hugging Face hub.
        family: as its authors call it.
        parameters: number of weights.
        embeddings: of these, those of the embedding and the output layer; quantisation leaves them at 16 bits.
    """

    name: str
    family: str
    parameters: int
    embeddings: int

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of the weights as float32, bfloat16, float16, 8bit or 4bit."""
        size = _BYTES[dtype]
        return round((self.parameters - self.embeddings) * size + self.embeddings * max(size, 2.0))

    def needed_bytes(self, dtype: str) -> int:
        """Return the bytes to watch and to answer with: the weights, and an estimate of the rest."""
        weights = self.weight_bytes(dtype)
        return weights + max(_WORKING_BYTES, round(weights * _WORKING_SHARE))


def _known(name: str, family: str, millions: int, embedding_millions: int) -> KnownModel:
    return KnownModel(name, family, millions * 1_000_000, embedding_millions * 1_000_000)


KNOWN_MODELS: Final = (
    _known("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", "SmolVLM2", 256, 57),
    _known("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "SmolVLM2", 507, 95),
    _known("HuggingFaceTB/SmolVLM2-2.2B-Instruct", "SmolVLM2", 2_247, 202),
    _known("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "LLaVA-OneVision", 894, 136),
    _known("llava-hf/llava-onevision-qwen2-7b-ov-hf", "LLaVA-OneVision", 8_030, 1_090),
    _known("Qwen/Qwen2-VL-2B-Instruct", "Qwen2-VL", 2_209, 233),
    _known("Qwen/Qwen2-VL-7B-Instruct", "Qwen2-VL", 8_291, 1_090),
    _known("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen2.5-VL", 3_755, 311),
    _known("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL", 8_292, 1_090),
    _known("Qwen/Qwen3-VL-2B-Instruct", "Qwen3-VL", 2_128, 311),
    _known("Qwen/Qwen3-VL-4B-Instruct", "Qwen3-VL", 4_438, 389),
    _known("Qwen/Qwen3-VL-8B-Instruct", "Qwen3-VL", 8_767, 1_245),
    _known("OpenGVLab/InternVL3-1B-hf", "InternVL 3", 938, 272),
    _known("OpenGVLab/InternVL3-2B-hf", "InternVL 3", 2_089, 466),
    _known("OpenGVLab/InternVL3-8B-hf", "InternVL 3", 7_944, 1_087),
    _known("OpenGVLab/InternVL3_5-1B-HF", "InternVL 3.5", 1_061, 311),
    _known("OpenGVLab/InternVL3_5-2B-HF", "InternVL 3.5", 2_348, 622),
    _known("OpenGVLab/InternVL3_5-4B-HF", "InternVL 3.5", 4_732, 778),
    _known("OpenGVLab/InternVL3_5-8B-HF", "InternVL 3.5", 8_528, 1_245),
)
DTYPES_OF_WEIGHTS: Final = ("float32", "bfloat16", "8bit", "4bit")
"""The forms of weights that a table shows; float16 takes what bfloat16 takes."""


def models_that_fit(free_bytes: int, dtype: str = "bfloat16") -> list[KnownModel]:
    """Return the models that fit into this much free memory in this dtype, the smallest first.

    On a CPU the models are loaded as float32 unless `--dtype` says otherwise; on an accelerator as they were saved.
    """
    fitting = [model for model in KNOWN_MODELS if model.needed_bytes(dtype) <= free_bytes]
    return sorted(fitting, key=lambda model: model.parameters)
