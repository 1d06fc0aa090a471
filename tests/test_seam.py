"""One seam to the device: words of the device stand in one room, and a step goes through few
files.
"""

import re
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import protokv
from protokv.memories import MemoryConfig
from protokv.stream.session import Session
from tests.stub_backbone import StubBackbone

ROOT = Path(protokv.__file__).parent
WORDS = re.compile(
    r"\b[Gg]raphs?\b|\bpinned|pin_memory|cuda\.(Stream|graph|current_stream)|wait_stream"
    r"|\bsteady\b|ANSWER_ROWS|BIAS_COLUMNS|bias[_ ]columns?"
)
# The key of the timings, in the words of their readers; and slots of another engine.
FREE = {"timings.py", "stream/session.py", "vllm.py"}
MOST_CHANGES = 80


def test_words_of_the_device_stand_in_its_room_alone() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in ROOT.rglob("*.py")
        if file.parent.name != "device"
        for line in file.read_text(encoding="utf-8").splitlines()
        if WORDS.search(line) and str(file.relative_to(ROOT)) not in FREE
    ]
    assert found == []


def test_a_step_changes_file_seldom() -> None:
    backbone = StubBackbone(layers=1, kv_heads=2, groups=2, head_size=16, grid=(3, 3))
    session = Session.start(backbone, MemoryConfig.of("durable", budget=256))
    step = backbone.embed_step(np.zeros(0, np.uint8))
    for index in range(40):
        session.take([step], [float(index)])
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        session.take([step], [40.0])
    finally:
        sys.setprofile(before)
    changes = sum(one != other for one, other in pairwise(files))
    assert 20 < changes <= MOST_CHANGES
