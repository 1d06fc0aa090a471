"""Train the language model from nothing, on the stages of `curriculum`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from samples.training.bank import Bank
from samples.training.batches import IGNORED, Batch, judge_answers, make_batch
from samples.training.compose import Composer
from samples.training.curriculum import Stage
from samples.training.forward import compute_logits
from samples.training.loop import Loop, Outcome
from samples.training.model import make_model
from samples.training.stages import Say
from samples.training.vocabulary import token_ids

_EMBEDDING = "model.language_model.embed_tokens.weight"


def answer(model: Qwen2_5_VLForConditionalGeneration, batch: Batch) -> tuple[Tensor, list[bool]]:
    """Return the loss of the answers of a batch, and for each answer if it is right."""
    select = batch.labels != IGNORED
    logits = compute_logits(model, batch.tokens, batch.questions, select)
    loss = F.cross_entropy(logits.float(), batch.labels[select])
    return loss, judge_answers(logits.detach(), batch.labels)


class Trainer(Loop[Stage]):
    """A language model in training, with a frozen vision tower."""

    stream: ClassVar[int] = 20

    def __init__(
        self, visual: Mapping[str, Tensor], bank: Bank, seed: int, say: Say, **size: int
    ) -> None:
        model = make_model(seed, **size)
        model.model.visual.load_state_dict(dict(visual))
        super().__init__(model, seed, say)
        self.composer = Composer(bank)

    def begin(self, stage: Stage) -> None:
        """Set the embedding of "last" to minus that of "first", if the stage wants it."""
        if stage.oppose_last:
            ids = token_ids()
            with torch.no_grad():
                embedding = self.optimizer.masters[_EMBEDDING]
                embedding[ids["last"]] = -embedding[ids["first"]]
            self.optimizer.publish()

    def learn(self, rng: np.random.Generator, stage: Stage, progress: float) -> Outcome:
        """Compute the loss of the answers, with verdicts by type and by the mask of visual
        tokens.
        """
        batch = make_batch(rng, self.composer, stage, progress)
        loss, right = answer(self.model, batch)
        way = (
            "full"
            if batch.tokens.window is None
            else "window"
            if batch.tokens.far is None
            else "far"
        )
        verdicts = [
            (key, ok) for kind, ok in zip(batch.types, right, strict=True) for key in (kind, way)
        ]
        return Outcome(loss, verdicts)
