"""Train the shipped model to read what is said: `python -m samples.training.train_words --out DIR
[--seed N]`.

Builds a clip bank with the shipped vision tower, puts two layers in front of the shipped language
model, which bind names to shapes (`speech_surgery`), and trains it on two stages of one kind.
Exports to DIR/weights-words. Every stage writes a file to DIR, so the same command resumes after
the last finished stage. DIR/log.jsonl has every measurement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini.backbone import MiniBackbone
from samples.training import bank
from samples.training.curriculum import CURRICULUM, Stage
from samples.training.export import export
from samples.training.links import Link
from samples.training.model import TOKENS
from samples.training.order_batches import OrderBatch
from samples.training.order_curriculum import HELD_OUT, HELD_OUT_STAGE, WHOLE, OrderStage, Scene
from samples.training.order_trainer import MEASURED_CONTENT, OrderTrainer
from samples.training.order_worlds import PLACES
from samples.training.speech_batches import make_speech_batch
from samples.training.speech_surgery import BINDING_LAYER, NAMING_LAYER, bind_names
from samples.training.stages import Journal, run_bank_stage
from samples.training.surgery import insert_layers, tell_words_apart
from samples.worlds.phrases import SPEECH_TYPES

READING_LAYER: Final = 3
"""The layer whose attention shows the evidence of an answer: the second one before two were put in
front.
"""

WORDS_STEPS: Final = 1200
"""Steps of a full run, both stages together."""

COUNTS: Final = {kind: n // 6 for kind, n in bank.COUNTS.items()}
"""Clips of each kind. The pictures are known already, so few clips suffice."""

_EXAMPLES: Final = 1500

_VISUAL: Final = "model.visual."
_LAYERS: Final = "model.language_model.layers."
_WEIGHTS: Final = {
    "owner": 2.0,
    "owned": 1.5,
    "colour_of": 2.5,
    "where_of": 2.5,
    "colour": 0.5,
    "where": 0.5,
    "shape": 0.5,
    "at": 0.8,
    "whether": 0.6,
    "first": 0.3,
    "last": 0.3,
}

SPEAK: Final = OrderStage(
    name="speak",
    steps=0,
    rate=6e-4,
    warm_up=60,
    scene=Scene(events=(2, 5), others=(0, 16), span=(16, 500)),
    easy=0.8,
    tokens=1100,
    questions=8,
    weights=_WEIGHTS,
    links={},
    trains=tuple(
        f"model.language_model.{name}."
        for name in ("layers.2", "layers.3", "layers.4", "layers.5", "norm")
    ),
    window=0.15,
    far=0.25,
    drop=0.3,
    whole=0.1,
)

SETTLE: Final = replace(
    SPEAK,
    name="settle",
    rate_end=1e-5,
    easy=0.3,
    whole=0.15,
    weights={**_WEIGHTS, "owner": 5.0, "colour": 1.0, "where": 1.0, "at": 1.2},
)


def make_words_curriculum(steps: int = WORDS_STEPS) -> tuple[OrderStage, ...]:
    """Return the stages of a run of `steps` steps; the rate falls in the second half."""
    return replace(SPEAK, steps=steps // 2), replace(SETTLE, steps=steps - steps // 2)


class WordsTrainer(OrderTrainer):
    """A model with two layers in front of one that knows content."""

    stream: ClassVar[int] = 23
    links: ClassVar[Mapping[str, Link]] = {}
    whole: ClassVar[Stage] = replace(WHOLE, weights=CURRICULUM[-1].weights, tokens=2000)

    def make_model(
        self, state: Mapping[str, Tensor], seed: int
    ) -> Qwen2_5_VLForConditionalGeneration:
        """Make the model with the new layers, which look where names stand and for equal words from
        the start.
        """
        model = insert_layers(
            state, seed, inserted=(BINDING_LAYER, NAMING_LAYER), reading=READING_LAYER
        )
        tell_words_apart(model.model.language_model.embed_tokens.weight, seed, "content", "words")
        return model

    def begin(self, stage: OrderStage) -> None:
        """Set the new layers before the first stage."""
        super().begin(stage)
        if stage.name == SPEAK.name:
            lit = self.composer.bank.lit
            rng = np.random.default_rng([self.seed, self.stream, 200])
            rows = rng.integers(0, len(lit), _EXAMPLES)
            # Half of them lit, if the step has any.
            cells = np.where(
                np.arange(_EXAMPLES) % 2, lit[rows].argmax(-1), rng.integers(0, TOKENS, _EXAMPLES)
            )
            bind_names(self.model, self.composer.bank.features_at(rows, cells))
            self.optimizer.adopt()

    def make_batch(
        self, rng: np.random.Generator, stage: OrderStage, progress: float
    ) -> OrderBatch:
        """Make a batch of videos in which something is said."""
        return make_speech_batch(rng, self.composer, stage, progress)

    @torch.no_grad()
    def measure(self, stage: OrderStage) -> Mapping[str, Any]:
        """Return accuracy by place of the evidence and type, in crowded videos with the full
        cache.
        """
        if stage.quiet:
            return {}
        asked = replace(
            HELD_OUT_STAGE,
            weights=dict.fromkeys((*SPEECH_TYPES, *MEASURED_CONTENT, "whether"), 1.0),
        )
        shown = {place: replace(asked, scene=replace(HELD_OUT, place=place)) for place in PLACES}
        return {"held_out": self.answer_each(shown, 100)}


def train_words(
    folder: Path,
    seed: int,
    curriculum: Sequence[OrderStage],
    *,
    dtype: torch.dtype = torch.float32,
    counts: Mapping[int, int] = COUNTS,
) -> Path:
    """Run the missing stages of `folder`, with one thread for each process, and return the
    checkpoint folder.
    """
    torch.set_num_threads(1)
    say = Journal(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        MiniBackbone.folder("protokv/mini"), dtype=torch.float32
    )
    state: dict[str, Tensor] = model.state_dict()
    visual = {
        name.removeprefix(_VISUAL): tensor
        for name, tensor in state.items()
        if name.startswith(_VISUAL)
    }
    clips = run_bank_stage(folder, seed, visual, say, counts=counts)
    trainer = WordsTrainer(state, clips, seed, say, dtype)
    trainer.run(folder, curriculum)
    made = folder / "weights-words"
    export(trainer.float_model(), made, "words")
    say({"exported": True})
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the path of the checkpoint."""
    parser = argparse.ArgumentParser(
        prog="python -m samples.training.train_words", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for stages, log and the checkpoint"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, default=WORDS_STEPS, help="steps of both stages together"
    )
    options = parser.parse_args(arguments)
    sys.stderr.write(f"training; measurements go to {options.out / 'log.jsonl'}\n")
    sys.stdout.write(
        f"{train_words(options.out, options.seed, make_words_curriculum(options.steps))}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
