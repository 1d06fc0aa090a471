"""Train the embedded model from nothing: `python -m samples.training.train --out DIR [--seed N]`.

Trains the vision tower, builds the clip bank, runs the language stages, and exports to DIR/weights.
Every stage writes a file to DIR, so the same command resumes after the last finished stage.
DIR/log.jsonl has every measurement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from samples.training.curriculum import CURRICULUM
from samples.training.export import export
from samples.training.stages import Journal, run_bank_stage, run_vision_stage
from samples.training.trainer import Trainer


def train(folder: Path, seed: int, *, until: str | None = None) -> Path:
    """Run the missing stages of `folder`, with one thread for each process, and return the
    checkpoint folder.

    `until` names the last stage to run (None: all).
    """
    torch.set_num_threads(1)
    say = Journal(folder)
    visual = run_vision_stage(folder, seed, say)
    bank = run_bank_stage(folder, seed, visual, say)
    trainer = Trainer(visual, bank, seed, say)
    names = [stage.name for stage in CURRICULUM]
    last = len(names) if until is None else names.index(until) + 1
    trainer.run(folder, CURRICULUM[:last])
    weights = folder / "weights"
    export(trainer.float_model(), weights)
    say({"exported": True})
    return weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the path of the checkpoint."""
    parser = argparse.ArgumentParser(
        prog="python -m samples.training.train", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for stages, log and the checkpoint"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--until", choices=[stage.name for stage in CURRICULUM], help="last stage to run"
    )
    options = parser.parse_args(arguments)
    print(f"training; measurements go to {options.out / 'log.jsonl'}", file=sys.stderr)
    print(train(options.out, options.seed, until=options.until))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
