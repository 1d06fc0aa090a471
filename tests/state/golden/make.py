"""Write the golden states of the current format version and digests of their content.

Run `python -m tests.state.golden.make` when `FORMAT_VERSION` is raised. Keep the files of older versions: users have
such states.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from protokv.backbones import load_backbone
from protokv.core.session import Session
from protokv.memories import DurableConfig, MemoryConfig, PaperConfig
from protokv.state.checkpoint import to_state
from protokv.state.digest import canonical, digest_tensors
from protokv.state.header import FORMAT_VERSION
from protokv.state.reader import load_state
from protokv.state.writer import save_state
from tests.backbones.tiny import write_qwen2_5_vl
from tests.conftest import random_frames

FOLDER = Path(__file__).parent
CONTENTS = FOLDER / "contents.json"
STEPS = 14

SMALL = {"subquantizers": 4, "codewords": 4, "warmup_residuals": 16}
CONFIGS: dict[str, tuple[MemoryConfig, tuple[str, ...]]] = {
    "paper": (PaperConfig(budget=24).with_fields(SMALL), (".safetensors",)),
    "durable": (DurableConfig(budget=24), (".safetensors",)),
    # A folder has two files a tensor, so it holds the memory with the fewest.
    "sliding-window": (MemoryConfig.of("sliding-window", budget=24), (".safetensors", ".zarr")),
}


def content(path: Path) -> str:
    """Return a digest of the content of a state; it is the same in every form."""
    state = load_state(path)
    header = {name: value for name, value in state.to_json().items() if name not in ("format_version", "created_by")}
    tensors = digest_tensors(state.tensors)
    return hashlib.sha256(canonical({"header": header, "tensors": tensors}).encode()).hexdigest()[:16]


def main() -> None:
    """Write the states and their contents."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as model:
        tiny = load_backbone(str(write_qwen2_5_vl(Path(model))), device="cpu", dtype="float32")
    contents = json.loads(CONTENTS.read_text()) if CONTENTS.exists() else {}
    for name, (config, suffixes) in CONFIGS.items():
        session = Session.start(tiny, config, fps=2.0)
        for seed in range(STEPS):
            session.watch(random_frames(seed))
        source = {"name": "random.mp4", "size_bytes": 1234, "duration_s": float(STEPS)}
        state = to_state(session, source=source, complete=True)
        # The model was in a temporary folder.
        state = replace(state, backbone=replace(state.backbone, name="tests/tiny"))
        for suffix in suffixes:
            path = FOLDER / f"v{FORMAT_VERSION}-{name}{suffix}"
            save_state(state, path)
            contents[path.name] = content(path)
    CONTENTS.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
