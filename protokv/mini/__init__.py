"""The embedded model `protokv/mini`: its weights, its vocabulary and the procedural world that it knows.

The weights are a Qwen2.5-VL checkpoint that `from_pretrained` loads; `network` runs them without transformers, and is
the only module here that needs torch. How they were trained is in `protokv.mini.training`, which is part of the
repository but not of the installed package.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["WORLD_MARK", "weights_folder"]

WORLD_MARK = "drawn by the procedural world of protokv/mini"
"""The comment in files of its world: of whatever else the model watches, its answers mean nothing."""


def weights_folder() -> Path:
    """The folder with the shipped checkpoint."""
    return Path(__file__).with_name("weights")
