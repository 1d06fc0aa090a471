"""The first two stages of training, and the files of all stages: plain safetensors in one folder.

A stage whose file exists is not run again, so training can be resumed. Files are complete or
absent.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file, save_file
from torch import Tensor

from samples.training.bank import COUNTS, Bank, build_bank
from samples.training.model import make_model
from samples.training.vision_training import train_vision

VISION_STEPS: Final = 3600
Say = Callable[[dict[str, Any]], None]


class Journal:
    """The `log.jsonl` of a run: one JSON object a line, with wall and CPU seconds of this
    process.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        self.start_s = time.time()

    def __call__(self, record: dict[str, Any]) -> None:
        """Append a record."""
        stamp = {
            "wall_s": round(time.time() - self.start_s, 1),
            "cpu_s": round(sum(os.times()[:4]), 1),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | stamp) + "\n")


def save_atomically(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that is either complete or absent."""
    part = path.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in tensors.items()}, part)
    part.replace(path)


def run_vision_stage(
    folder: Path, seed: int, say: Say, *, steps: int = VISION_STEPS, **size: int
) -> dict[str, Tensor]:
    """Return the float32 state of the trained vision tower; train it if `vision.safetensors` is
    missing.
    """
    path = folder / "vision.safetensors"
    if not path.exists():
        visual = make_model(seed, **size).model.visual
        train_vision(visual, seed, steps, say)
        save_atomically(visual.state_dict(), path)
        say({"stage": "vision", "end": True})
    return load_file(path)


def run_bank_stage(
    folder: Path,
    seed: int,
    visual_state: Mapping[str, Tensor],
    say: Say,
    *,
    counts: Mapping[int, int] = COUNTS,
    processes: int = 2,
    **size: int,
) -> Bank:
    """Return the clip bank; build it if `bank.safetensors` is missing."""
    path = folder / "bank.safetensors"
    if not path.exists():
        bank = build_bank(visual_state, seed, counts=counts, processes=processes, **size)
        save_atomically(bank.tensors(), path)
        say({"stage": "bank", "clips": len(bank.length), "steps": len(bank.lit), "end": True})
    return Bank.from_tensors(load_file(path))
