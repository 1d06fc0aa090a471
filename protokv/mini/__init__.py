"""The embedded models `protokv/mini`, `-order` and `-words`: weights, network, vocabulary and procedural world.

The weights are Qwen2.5-VL checkpoints that `from_pretrained` loads; `network` runs them without transformers and is the
only module here that needs torch. They were trained by `samples.training`, which is not part of the installed package.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["EMBEDDED", "EMBEDDED_ORDER", "EMBEDDED_WORDS", "is_embedded", "weights_folder"]

EMBEDDED = "protokv/mini"
EMBEDDED_ORDER = "protokv/mini-order"
"""The larger model, which also reads order and counts appearances; a step takes about 1.7 times as long."""
EMBEDDED_WORDS = "protokv/mini-words"
"""`EMBEDDED` with two more layers, which also reads what is said."""

_FOLDERS = {EMBEDDED: "weights", EMBEDDED_ORDER: "weights-order", EMBEDDED_WORDS: "weights-words"}


def is_embedded(name: str) -> bool:
    """Return True if a model of this name is part of the package."""
    return name in _FOLDERS


def weights_folder(name: str = EMBEDDED) -> Path:
    """Return the folder of an embedded model."""
    return Path(__file__).with_name(_FOLDERS[name])
