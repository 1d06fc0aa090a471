"""Runs the language stages: updates, accuracy by type, gates, and a file at the end of each stage.

What a stage shows is the curriculum's. A stage depends on the seed and its number alone, so a run that resumes
between two stages ends with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini.training.bank import Bank
from protokv.mini.training.batches import IGNORED, Batch, judge_answers, make_batch
from protokv.mini.training.compose import Composer
from protokv.mini.training.curriculum import CURRICULUM, Stage
from protokv.mini.training.forward import compute_logits
from protokv.mini.training.model import make_model
from protokv.mini.training.optimizer import MasterAdamW
from protokv.mini.training.stages import Say, save_atomically
from protokv.mini.vocabulary import token_ids

WINDOW = 100
"""Steps between two records, and over which a gate measures."""

_EMBEDDING = "model.language_model.embed_tokens.weight"


def stage_file(folder: Path, stage: Stage) -> Path:
    """Where a stage leaves its result."""
    return folder / f"stage-{stage.name}.safetensors"


def rate_at(stage: Stage, step: int) -> float:
    """Learning rate: a short linear warm-up, then constant, or a cosine down to rate_end."""
    rate = stage.rate
    if stage.rate_end is not None:
        rate = stage.rate_end + (rate - stage.rate_end) * 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return rate * min(1.0, (step + 1) / stage.warm_up)


class Trainer:
    """A model with a frozen vision tower and what is needed to train the rest of it."""

    def __init__(self, visual: Mapping[str, Tensor], bank: Bank, seed: int, say: Say, **size: int) -> None:
        self.seed, self.say = seed, say
        self.composer = Composer(bank)
        self.model = make_model(seed, **size)
        self.model.model.visual.load_state_dict(dict(visual))
        self.model.model.visual.requires_grad_(False)
        self.optimizer = MasterAdamW((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        # The tied output layer is a second name of the embedding, which is bfloat16 by now.
        self.model.tie_weights()

    def run(self, folder: Path, curriculum: Sequence[Stage] = CURRICULUM) -> None:
        """Every stage in order; those whose files are in `folder` are taken as done."""
        done = [i for i, stage in enumerate(curriculum) if stage_file(folder, stage).exists()]
        first = 0
        if done:
            first = done[-1] + 1
            self.optimizer.load(load_file(stage_file(folder, curriculum[done[-1]])))
            self.say({"resumed_after": curriculum[done[-1]].name})
        for index in range(first, len(curriculum)):
            self.run_stage(curriculum[index], index)
            save_atomically(self.optimizer.tensors(), stage_file(folder, curriculum[index]))

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        select = batch.labels != IGNORED
        logits = compute_logits(
            self.model,
            batch.features,
            batch.questions,
            batch.times,
            batch.end,
            select,
            window=batch.window,
            far=batch.far,
            seen=batch.seen,
        )
        return F.cross_entropy(logits.float(), batch.labels[select]), logits.detach()

    def _oppose_last(self) -> None:
        ids = token_ids()
        with torch.no_grad():
            embedding = self.optimizer.masters[_EMBEDDING]
            embedding[ids["last"]] = -embedding[ids["first"]]
        self.optimizer.publish()

    def run_stage(self, stage: Stage, index: int) -> float:
        """Train one stage; returns the mean loss of its last window."""
        rng = np.random.default_rng([self.seed, 20, index])
        if stage.oppose_last:
            self._oppose_last()
        self.say({"stage": stage.name, "begin": asdict(stage)})
        counts: dict[str, list[int]] = {}
        loss_sum, met, n, mean = 0.0, 0, 0, math.inf
        for step in range(stage.steps):
            batch = make_batch(rng, self.composer, stage, step / stage.steps)
            loss, logits = self._loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step(rate_at(stage, step))
            loss_sum, n = loss_sum + loss.item(), n + 1
            way = "full" if batch.window is None else "window" if batch.far is None else "far"
            for kind, ok in zip(batch.types, judge_answers(logits, batch.labels), strict=True):
                for key in (kind, way):
                    pair = counts.setdefault(key, [0, 0])
                    pair[0] += 1
                    pair[1] += ok
            if n == WINDOW or step + 1 == stage.steps:
                mean = loss_sum / n
                accuracy = {k: round(v[1] / v[0], 3) for k, v in sorted(counts.items())}
                self.say({"stage": stage.name, "step": step + 1, "loss": round(mean, 4), **accuracy})
                met = met + 1 if all(accuracy.get(k, 0.0) >= v for k, v in stage.gate.items()) else 0
                counts, loss_sum, n = {}, 0.0, 0
                if stage.gate and met >= stage.gate_times:
                    break
        self.say({"stage": stage.name, "end": True, "steps": step + 1})
        return mean

    def float_model(self) -> Qwen2_5_VLForConditionalGeneration:
        """A float32 copy of the model with the master weights."""
        model = make_model(
            0, self.model.config.text_config.num_hidden_layers, self.model.config.text_config.hidden_size
        )
        state = {n: p.detach().float() for n, p in self.model.named_parameters()}
        state |= {n: m.detach() for n, m in self.optimizer.masters.items()}
        model.load_state_dict(state, strict=False)
        model.tie_weights()
        return model.eval()
