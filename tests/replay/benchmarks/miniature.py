"""Every data set in small: two videos, annotated with the fields of the published schemas.

No annotation of a real set is here: those in the folder `miniature` are our own. The embedded model
knows no letters, so its answers are mostly wrong.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from tests.cli.conftest import write_video

ANNOTATIONS = Path(__file__).parent / "miniature"
LENGTH_S = 14
NAMES = ("clip21", "clip22")
# Data set -> folders of its videos. Each task of MLVU has its own.
VIDEOS = {
    "rvs-ego": ["videos"],
    "rvs-movie": ["videos"],
    "ovo-bench": ["src_videos/Ego4D/clips"],
    "streamingbench": ["videos"],
    "videomme": ["data"],
    "mlvu": [f"video/{file.stem}" for file in (ANNOTATIONS / "mlvu/json").glob("[1-7]_*.json")],
}


def write_clips(folder: Path) -> list[Path]:
    return [
        write_video(folder / f"{name}.mp4", LENGTH_S, seed=seed, rate=4)
        for seed, name in enumerate(NAMES)
    ]


def write_dataset(name: str, root: Path, clips: list[Path]) -> None:
    """Write annotations and videos; those of RVS-Movie are key frames, and VideoMME is Parquet."""
    shutil.copytree(ANNOTATIONS / name, root)
    for table in root.glob("videomme/*.json"):
        rows = arrow.Table.from_pylist(json.loads(table.read_text()))
        parquet.write_table(rows, table.with_suffix(".parquet"))
        table.unlink()
    for folder in VIDEOS[name]:
        (root / folder).mkdir(parents=True)
        for seed, clip in enumerate(clips):
            path = root / folder / clip.name
            if name == "rvs-movie":
                noise = np.random.default_rng(seed)
                frames = noise.integers(0, 256, (LENGTH_S, 84, 84, 3), dtype=np.uint8)
                np.save(path.with_suffix(".npy"), frames)
            else:
                os.link(clip, path)
