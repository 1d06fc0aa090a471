"""Train the shipped model on order, then on time: `python -m samples.training.train_order --out DIR
[--seed N]`.

Builds the clip bank with the shipped vision tower, inserts two layers into the shipped language
model, and trains it on the stages of `order_curriculum`. Then inserts two more, trains on the
stages of `time_curriculum`, and exports to DIR/weights-order. Every stage writes a file to DIR, so
the same command resumes after the last finished stage. DIR/log.jsonl has every measurement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini.backbone import MiniBackbone
from samples.training.bank import COUNTS
from samples.training.export import export
from samples.training.order_curriculum import STEPS, OrderStage, make_curriculum
from samples.training.order_trainer import OrderTrainer
from samples.training.stages import Journal, run_bank_stage
from samples.training.time_curriculum import TIME_STEPS, make_time_curriculum
from samples.training.time_trainer import TimeTrainer

_VISUAL: Final = "model.visual."


def train_order(
    folder: Path,
    seed: int,
    curriculum: Sequence[OrderStage],
    time_curriculum: Sequence[OrderStage],
    *,
    weights: Path | None = None,
    dtype: torch.dtype = torch.float32,
    counts: Mapping[int, int] = COUNTS,
) -> Path:
    """Run the missing stages of `folder`, with one thread for each process, and return the
    checkpoint folder.

    `weights` is a checkpoint folder with a model of content of four layers (None: the shipped one).
    """
    torch.set_num_threads(1)
    say = Journal(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        weights or MiniBackbone.folder("protokv/mini"), dtype=torch.float32
    )
    state: dict[str, Tensor] = model.state_dict()
    visual = {
        name.removeprefix(_VISUAL): tensor
        for name, tensor in state.items()
        if name.startswith(_VISUAL)
    }
    bank = run_bank_stage(folder, seed, visual, say, counts=counts)
    trainer = OrderTrainer(state, bank, seed, say, dtype)
    trainer.run(folder, curriculum)
    longer = TimeTrainer(trainer.float_model().state_dict(), bank, seed, say, dtype)
    known = trainer.optimizer.tensors().items()
    longer.optimizer.load(
        {name: tensor for name, tensor in known if name.startswith("master.links.")}
    )
    longer.run(folder, time_curriculum)
    made = folder / "weights-order"
    export(longer.float_model(), made, "time")
    say({"exported": True})
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the path of the checkpoint."""
    parser = argparse.ArgumentParser(
        prog="python -m samples.training.train_order", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for stages, log and the checkpoint"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="steps of the stages of order together"
    )
    parser.add_argument(
        "--time-steps", type=int, default=TIME_STEPS, help="steps of those behind them"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="bfloat16 where its products are fast",
    )
    options = parser.parse_args(arguments)
    sys.stderr.write(f"training; measurements go to {options.out / 'log.jsonl'}\n")
    dtype = getattr(torch, options.dtype)
    order = make_curriculum(options.steps)
    time = make_time_curriculum(options.time_steps)
    made = train_order(options.out, options.seed, order, time, dtype=dtype)
    sys.stdout.write(f"{made}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
