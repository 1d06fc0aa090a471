"""Writes the golden states of the current format version: `python -m tests.snapshot.golden.make`.

Run it once, when `FORMAT_VERSION` is raised, and never again for that version: these files stand for what users have.
Those of older versions were written in the same way by the code of that version.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from protokv import storage
from protokv.backbones import load_backbone
from protokv.config import ContinuityConfig, DurableConfig, MemoryConfig, PaperConfig
from protokv.core.session import Session
from protokv.core.snapshot import FORMAT_VERSION
from protokv.storage import checkpoint
from tests.backbones.tiny import write_qwen2_5_vl
from tests.conftest import random_frames

FOLDER = Path(__file__).parent

SMALL = {"subquantizers": 4, "codewords": 4, "warmup_residuals": 16}
CONFIGS: dict[str, tuple[MemoryConfig, tuple[str, ...]]] = {
    "paper": (PaperConfig(budget=24).with_fields(SMALL), (".safetensors",)),
    "durable": (DurableConfig(budget=24), (".safetensors",)),
    "continuity": (ContinuityConfig(budget=24), (".safetensors",)),
    # A folder has two files a tensor, so it holds the memory with the fewest.
    "sliding-window": (MemoryConfig.of("sliding-window", budget=24), (".safetensors", ".zarr")),
}


def main(folder: Path = FOLDER) -> None:
    """Write them."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as model:
        tiny = load_backbone(str(write_qwen2_5_vl(Path(model))), device="cpu", dtype="float32")
    for name, (config, suffixes) in CONFIGS.items():
        session = Session.start(tiny, config, fps=2.0)
        for seed in range(14):
            session.watch(random_frames(seed))
        source = {"name": "random.mp4", "size_bytes": 1234, "duration_s": 14.0}
        state = checkpoint.to_state(session, source=source, complete=True)
        # The model was in a temporary folder, and its weights are not those of another version of torch.
        state = replace(state, backbone=replace(state.backbone, name="tests/tiny"))
        for suffix in suffixes:
            storage.save(state, folder / f"v{FORMAT_VERSION}-{name}{suffix}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
