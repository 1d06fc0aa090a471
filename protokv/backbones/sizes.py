"""Published models of the supported families, and what they take. Imports no torch and asks no hub.

Numbers of weights are those of transformers' models with the published configurations, and equal those of the files.
Shapes are what the adapters make of these configurations. Configurations come from the hub, from
https://github.com/huggingface/transformers (`convert_gemma4_weights.py`) for Gemma 4, and from copies of the files in
public repositories for Qwen3.5. Those of Qwen3.5-2B and of larger mixtures than 35B-A3B were not found whole, and they
are not listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

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
        kept: of these, those that quantisation leaves at 16 bits: embeddings, head, vision tower and experts.
        layers, kv_heads, head_size: of full attention, as in `MemoryShape`.
        tokens: the most visual tokens of a step.
        stored: dtype of its files.
        unread: weights in its files that are not loaded: heads that predict several tokens.
        sliding, recurrent, convolution: of its other layers, as in `CarriedShape`.
    """

    name: str
    family: str
    parameters: int
    kept: int
    layers: int
    kv_heads: int
    head_size: int
    tokens: int
    stored: str = "bfloat16"
    unread: int = 0
    sliding: tuple[int, int, int, int] | None = None
    recurrent: tuple[int, int, int, int] | None = None
    convolution: tuple[int, int, int] | None = None

    @property
    def frames_per_step(self) -> int:
        """Frames that make one step."""
        return 2 if self.family.startswith("Qwen") else 1

    @property
    def position_components(self) -> int:
        """P of `MemoryShape`."""
        return 3 if self.family.startswith("Qwen") else 1

    @property
    def download_bytes(self) -> int:
        """The bytes of its files of weights."""
        return round((self.parameters + self.unread) * _BYTES[self.stored])

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of the weights as float32, bfloat16, float16, 8bit or 4bit."""
        size = _BYTES[dtype]
        return round((self.parameters - self.kept) * size + self.kept * max(size, 2.0))

    def needed_bytes(self, dtype: str) -> int:
        """Return the bytes to watch and to answer with: the weights, and an estimate of the rest."""
        weights = self.weight_bytes(dtype)
        return weights + max(_WORKING_BYTES, round(weights * _WORKING_SHARE))


_SMOL: Final = "HuggingFaceTB/SmolVLM2-"
_LLAVA: Final = "llava-hf/llava-onevision-qwen2-"
_INTERN: Final = "OpenGVLab/InternVL3"
_MILLION: Final = 1_000_000


def _known(
    name: str, family: str, millions: int, kept: int, full: tuple[int, int, int], tokens: int, **more: Any
) -> KnownModel:
    return KnownModel(name, family, millions * _MILLION, kept * _MILLION, *full, tokens, **more)


def _qwen(name: str, family: str, millions: int, kept: int, full: tuple[int, int, int], **more: Any) -> KnownModel:
    return _known(f"Qwen/{name}", family, millions, kept, full, 768, **more)


def _qwen3_5(name: str, millions: int, kept: int, full: tuple[int, int, int], unread: int, heads: int) -> KnownModel:
    """Three of four layers are linear, with so many heads of values."""
    linear = 3 * full[0]
    recurrent, convolution = (linear, heads, 128, 128), (linear, 128 * (32 + heads), 4)
    more = {"recurrent": recurrent, "convolution": convolution, "unread": unread * _MILLION}
    return _qwen(name, "Qwen3.5", millions, kept, full, **more)


def _gemma(
    name: str, millions: int, kept: int, full: tuple[int, int, int], sliding: tuple[int, int, int, int]
) -> KnownModel:
    return _known(f"google/gemma-4-{name}", "Gemma 4", millions, kept, full, 70, sliding=sliding)


KNOWN_MODELS: Final = (
    _known(f"{_SMOL}256M-Video-Instruct", "SmolVLM2", 256, 150, (30, 3, 64), 64, stored="float32"),
    _known(f"{_SMOL}500M-Video-Instruct", "SmolVLM2", 507, 193, (32, 5, 64), 64, stored="float32"),
    _known(f"{_SMOL}2.2B-Instruct", "SmolVLM2", 2_247, 636, (24, 32, 64), 81, stored="float32"),
    _known(f"{_LLAVA}0.5b-ov-hf", "LLaVA-OneVision", 894, 536, (24, 2, 64), 196),
    _known(f"{_LLAVA}7b-ov-hf", "LLaVA-OneVision", 8_030, 1_506, (28, 4, 128), 196),
    _qwen("Qwen2-VL-2B-Instruct", "Qwen2-VL", 2_209, 899, (28, 2, 128)),
    _qwen("Qwen2-VL-7B-Instruct", "Qwen2-VL", 8_291, 1_766, (28, 4, 128)),
    _qwen("Qwen2.5-VL-3B-Instruct", "Qwen2.5-VL", 3_755, 980, (36, 2, 128)),
    _qwen("Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL", 8_292, 1_767, (28, 4, 128)),
    _qwen("Qwen3-VL-2B-Instruct", "Qwen3-VL", 2_128, 718, (28, 8, 128)),
    _qwen("Qwen3-VL-4B-Instruct", "Qwen3-VL", 4_438, 805, (36, 8, 128)),
    _qwen("Qwen3-VL-8B-Instruct", "Qwen3-VL", 8_767, 1_821, (36, 8, 128)),
    _qwen3_5("Qwen3.5-0.8B", 853, 356, (6, 2, 256), 20, 16),
    _qwen3_5("Qwen3.5-4B", 4_539, 970, (8, 4, 256), 121, 32),
    _qwen3_5("Qwen3.5-9B", 9_410, 2_491, (8, 4, 256), 243, 32),
    _qwen3_5("Qwen3.5-27B", 27_357, 3_030, (16, 4, 256), 425, 48),
    _qwen3_5("Qwen3.5-35B-A3B", 35_107, 33_698, (10, 2, 256), 845, 32),
    _known(f"{_INTERN}-1B-hf", "InternVL 3", 938, 580, (24, 2, 64), 256),
    _known(f"{_INTERN}-2B-hf", "InternVL 3", 2_089, 779, (28, 2, 128), 256),
    _known(f"{_INTERN}-8B-hf", "InternVL 3", 7_944, 1_419, (28, 4, 128), 256),
    _known(f"{_INTERN}_5-1B-HF", "InternVL 3.5", 1_061, 621, (28, 8, 128), 256),
    _known(f"{_INTERN}_5-2B-HF", "InternVL 3.5", 2_348, 939, (28, 8, 128), 256),
    _known(f"{_INTERN}_5-4B-HF", "InternVL 3.5", 4_732, 1_099, (36, 8, 128), 256),
    _known(f"{_INTERN}_5-8B-HF", "InternVL 3.5", 8_528, 1_583, (36, 8, 128), 256),
    _gemma("E2B-it", 5_104, 3_228, (3, 1, 512), (12, 1, 511, 256)),
    _gemma("E4B-it", 7_941, 3_968, (4, 2, 512), (20, 2, 511, 256)),
    _gemma("26B-A4B-it", 25_806, 24_150, (5, 2, 512), (25, 8, 1023, 256)),
    _gemma("31B-it", 31_273, 1_986, (10, 4, 512), (50, 16, 1023, 256)),
)
DTYPES_OF_WEIGHTS: Final = ("float32", "bfloat16", "8bit", "4bit")
"""The forms of weights that a table shows; float16 takes what bfloat16 takes."""
