"""The embedded model `protokv/mini` and a larger one: weights, vocabulary, the procedural world that they know.

Weights are a Qwen2.5-VL checkpoint that `from_pretrained` loads; `network` runs them without transformers, and is
the only module here that needs torch. How they were trained is in `samples.training`, which is part of the
repository but not of the installed package.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["EMBEDDED", "EMBEDDED_ORDER", "WORLD_MARK", "is_embedded", "weights_folder"]

EMBEDDED = "protokv/mini"
EMBEDDED_ORDER = "protokv/mini-order"
"""The one that also reads order, and how often a shape came; larger, and slower by a third."""

_FOLDERS = {EMBEDDED: "weights", EMBEDDED_ORDER: "weights-order"}

WORLD_MARK = "drawn by the procedural world of protokv/mini"
"""The comment in files of its world: of whatever else the model watches, its answers mean nothing."""


def is_embedded(name: str) -> bool:
    """Whether a model of this name is part of the package."""
    return name in _FOLDERS


def weights_folder(name: str = EMBEDDED) -> Path:
    """The folder with a shipped checkpoint."""
    return Path(__file__).with_name(_FOLDERS[name])
