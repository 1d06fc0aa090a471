"""Train a model of content to read order, on the stages of `order_curriculum`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from samples.training.bank import Bank
from samples.training.batches import IGNORED, judge_answers, make_batch
from samples.training.clock_batches import make_clock_batch
from samples.training.compose import Composer
from samples.training.curriculum import Stage
from samples.training.forward import compute_logits, read_questions
from samples.training.links import LINKS, Link, make_readings, measure_links
from samples.training.loop import Loop, Outcome
from samples.training.order_batches import OrderBatch, make_order_batch
from samples.training.order_curriculum import CLOCK, HELD_OUT, HELD_OUT_STAGE, WHOLE, OrderStage
from samples.training.order_worlds import PLACES
from samples.training.stages import Say
from samples.training.surgery import insert_layers, look_back, tell_words_apart
from samples.training.trainer import answer
from samples.training.visual_tokens import N_PREFIX

MEASURED: Final = ("middle_first", "middle_last", "middle_before", "middle_after", "third", "tenth")
MEASURED_CONTENT: Final = ("colour", "shape", "where", "at")


class OrderTrainer(Loop[OrderStage]):
    """A model with two more layers than `state`, and the readings of its links."""

    stream: ClassVar[int] = 21
    window: ClassVar[int] = 50
    held_out_batches: ClassVar[int] = 12
    links: ClassVar[Mapping[str, Link]] = LINKS
    whole: ClassVar[Stage] = WHOLE

    def __init__(
        self,
        state: Mapping[str, Tensor],
        bank: Bank,
        seed: int,
        say: Say,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model = self.make_model(state, seed)
        self.readings = make_readings(model.config.text_config.hidden_size, self.links)
        further = [(f"links.{n}", p) for n, p in self.readings.named_parameters()]
        super().__init__(model, seed, say, dtype, further)
        self.composer = Composer(bank)

    def make_model(
        self, state: Mapping[str, Tensor], seed: int
    ) -> Qwen2_5_VLForConditionalGeneration:
        """Make the model with the new layers."""
        model = insert_layers(state, seed)
        tell_words_apart(model.model.language_model.embed_tokens.weight, seed, "content", "order")
        look_back(model)
        return model

    def begin(self, stage: OrderStage) -> None:
        """Train only the parameters that the stage names."""
        for name, parameter in self.optimizer.parameters.items():
            parameter.requires_grad_(name.startswith(stage.trains))

    def make_batch(
        self, rng: np.random.Generator, stage: OrderStage, progress: float
    ) -> OrderBatch:
        """Make the next batch at the fraction `progress` of a stage."""
        if stage.name == CLOCK.name:
            return make_clock_batch(rng, self.composer, stage)
        return make_order_batch(rng, self.composer, stage, progress)

    def learn(self, rng: np.random.Generator, stage: OrderStage, progress: float) -> Outcome:
        """Compute the loss of answers and links, with verdicts by type and link."""
        if stage.quiet:
            return self._learn_alone(rng, stage, progress)
        if rng.random() < stage.whole:
            return self._ask_whole(rng, progress)
        return self._ask(rng, stage, progress)

    def _learn_alone(self, rng: np.random.Generator, stage: OrderStage, progress: float) -> Outcome:
        """Let some layers learn their links alone, with a penalty on what they add."""
        batch = self.make_batch(rng, stage, progress)
        depth = max(stage.quiet) + 1
        select = batch.labels != IGNORED
        _, tapped = read_questions(
            self.model, batch.tokens, batch.questions, select, range(depth + 1), depth
        )
        losses: dict[str, float] = {}
        loss, _ = self.teach(batch, tapped, stage, torch.zeros(()), losses)
        nv = N_PREFIX + batch.tokens.times.shape[1]
        for layer, (on_visual, on_words) in stage.quiet.items():
            added = tapped[layer + 1] - tapped[layer]
            visual = added[:, N_PREFIX:nv].float().square().mean()
            words = torch.cat([added[:, :N_PREFIX], added[:, nv:]], 1).float().square().mean()
            losses |= {
                f"visual_rms_{layer}": visual.item() ** 0.5,
                f"words_rms_{layer}": words.item() ** 0.5,
            }
            loss = loss + on_visual * visual + on_words * words
        return Outcome(loss, (), losses)

    def teach(
        self,
        batch: OrderBatch,
        tapped: Mapping[int, Tensor],
        stage: OrderStage,
        loss: Tensor,
        losses: dict[str, float],
    ) -> tuple[Tensor, list[tuple[str, bool]]]:
        """Add the weighted losses of the links to `loss`, note them in `losses`, and return the
        verdicts by link.
        """
        measured = measure_links(self.links, self.readings, tapped, batch.links, tuple(stage.links))
        loss = weigh(stage, {name: own for name, (own, _) in measured.items()}, loss, losses)
        later = measured["later"][1][:, 0].tolist() if "later" in measured else []
        return loss, [("later", ok) for ok in later]

    def _ask(self, rng: np.random.Generator, stage: OrderStage, progress: float) -> Outcome:
        batch = self.make_batch(rng, stage, progress)
        select = batch.labels != IGNORED
        logits, tapped = read_questions(
            self.model, batch.tokens, batch.questions, select, self.find_taps(stage)
        )
        answered = F.cross_entropy(logits.float(), batch.labels[select])
        losses = {"answer": answered.item()}
        loss, of_links = self.teach(batch, tapped, stage, answered, losses)
        verdicts = [
            *zip(batch.types, judge_answers(logits.detach(), batch.labels), strict=True),
            *of_links,
        ]
        return Outcome(loss, verdicts, losses)

    def find_taps(self, stage: OrderStage) -> set[int]:
        """Return the layers behind which a link is read."""
        return {self.links[name].layer for name in stage.links if name in self.links}

    def _ask_whole(self, rng: np.random.Generator, progress: float) -> Outcome:
        batch = make_batch(rng, self.composer, self.whole, progress)
        loss, right = answer(self.model, batch)
        verdicts = [(f"whole_{kind}", ok) for kind, ok in zip(batch.types, right, strict=True)]
        return Outcome(loss, verdicts, {"answer_whole": loss.item()})

    @torch.no_grad()
    def measure(self, stage: OrderStage) -> Mapping[str, Any]:
        """Return accuracy by place of the evidence and type, in crowded videos with the full
        cache.
        """
        if stage.quiet:
            return {}
        asked = replace(HELD_OUT_STAGE, weights=dict.fromkeys((*MEASURED, *MEASURED_CONTENT), 1.0))
        shown = {place: replace(asked, scene=replace(HELD_OUT, place=place)) for place in PLACES}
        return {"held_out": self.answer_each(shown, 100)}

    def answer_each(
        self, shown: Mapping[str, OrderStage], first: int
    ) -> dict[str, dict[str, float]]:
        """Return the result of `answer` for each stage; their random streams are numbered from
        `first`.
        """
        return {
            name: self.answer(
                np.random.default_rng([self.seed, self.stream, first + number]), stage
            )
            for number, (name, stage) in enumerate(shown.items())
        }

    def answer(self, rng: np.random.Generator, held_out: OrderStage) -> dict[str, float]:
        """Return accuracy by type of questions about held-out videos of a stage."""
        right: dict[str, list[bool]] = {}
        for _ in range(self.held_out_batches):
            batch = self.make_batch(rng, held_out, 0.0)
            logits = compute_logits(
                self.model, batch.tokens, batch.questions, batch.labels != IGNORED
            )
            for kind, ok in zip(batch.types, judge_answers(logits, batch.labels), strict=True):
                right.setdefault(kind, []).append(ok)
        return {kind: round(float(np.mean(ok)), 3) for kind, ok in sorted(right.items())}


def weigh(
    stage: OrderStage, found: Mapping[str, Tensor], loss: Tensor, losses: dict[str, float]
) -> Tensor:
    """Add the losses in `found`, weighted by the stage, to `loss`, and note each in `losses`."""
    for name, own in found.items():
        loss = loss + stage.links[name] * own
        losses[name] = own.item()
    return loss
