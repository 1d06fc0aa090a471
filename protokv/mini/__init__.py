"""`protokv/mini`: a small model of ours, made by this package, and the procedural world it was trained on.

`weights_folder()` is a real Qwen2.5-VL checkpoint that `from_pretrained` loads. The world, the questions and the
rendering need no torch; only model.py, forward.py and what trains import it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["weights_folder"]


def weights_folder() -> Path:
    """The folder with the shipped checkpoint."""
    return Path(__file__).with_name("weights")
