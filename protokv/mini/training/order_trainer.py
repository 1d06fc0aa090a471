"""Trains a model that reads content to read order, on the stages of `order_curriculum`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protokv.mini.training.bank import Bank
from protokv.mini.training.batches import IGNORED, judge_answers, make_batch
from protokv.mini.training.clock_batches import make_clock_batch
from protokv.mini.training.compose import Composer
from protokv.mini.training.forward import compute_logits, read_questions
from protokv.mini.training.links import LINKS, make_readings, measure_links
from protokv.mini.training.loop import Loop, Outcome
from protokv.mini.training.order_batches import make_order_batch
from protokv.mini.training.order_curriculum import CLOCK, HELD_OUT, WHOLE, OrderStage
from protokv.mini.training.order_worlds import PLACES
from protokv.mini.training.stages import Say
from protokv.mini.training.surgery import insert_layers, look_back, tell_words_apart
from protokv.mini.training.trainer import answer
from protokv.mini.training.visual_tokens import N_PREFIX

QUIET_VISUAL: Final = 0.01
QUIET_WORDS: Final = 2.0
"""Penalties on the mean square of what the clock adds to visual tokens and to words, which are 13 times fainter."""

MEASURED: Final = ("middle_first", "middle_last", "middle_before", "middle_after", "third", "tenth")
MEASURED_CONTENT: Final = ("colour", "shape", "where", "at")


class OrderTrainer(Loop[OrderStage]):
    """A model with two layers more than `state`, and the readings of its links."""

    stream: ClassVar[int] = 21
    window: ClassVar[int] = 50
    held_out_batches: ClassVar[int] = 12

    def __init__(
        self, state: Mapping[str, Tensor], bank: Bank, seed: int, say: Say, dtype: torch.dtype = torch.float32
    ) -> None:
        model = insert_layers(state, seed)
        tell_words_apart(model, seed)
        look_back(model)
        self.readings = make_readings(model.config.text_config.hidden_size)
        further = [(f"links.{n}", p) for n, p in self.readings.named_parameters()]
        super().__init__(model, seed, say, dtype, further)
        self.composer = Composer(bank)

    def begin(self, stage: OrderStage) -> None:
        """Train what the stage names, and nothing else."""
        for name, parameter in self.optimizer.parameters.items():
            parameter.requires_grad_(name.startswith(stage.trains))

    def learn(self, rng: np.random.Generator, stage: OrderStage, progress: float) -> Outcome:
        """Loss of answers and links; right or not by type and link."""
        if stage.name == CLOCK.name:
            return self._set_clock(rng, stage)
        if rng.random() < stage.whole:
            return self._ask_whole(rng, progress)
        return self._ask(rng, stage, progress)

    def _set_clock(self, rng: np.random.Generator, stage: OrderStage) -> Outcome:
        """The first layer tells time by adding little."""
        batch = make_clock_batch(rng, self.composer, stage)
        select = batch.labels != IGNORED
        _, tapped = read_questions(self.model, batch.tokens, batch.questions, select, taps=(0, 1), depth=1)
        loss, _ = measure_links(self.readings, tapped, batch.links, ("clock",))["clock"]
        added = tapped[1] - tapped[0]
        nv = N_PREFIX + batch.tokens.times.shape[1]
        visual = added[:, N_PREFIX:nv].float().square().mean()
        words = torch.cat([added[:, :N_PREFIX], added[:, nv:]], 1).float().square().mean()
        losses = {"clock": loss.item(), "visual_rms": visual.item() ** 0.5, "words_rms": words.item() ** 0.5}
        total = stage.links["clock"] * loss + QUIET_VISUAL * visual + QUIET_WORDS * words
        return Outcome(total, (), losses)

    def _ask(self, rng: np.random.Generator, stage: OrderStage, progress: float) -> Outcome:
        batch = make_order_batch(rng, self.composer, stage, progress)
        taps = {LINKS[name].layer for name in stage.links}
        select = batch.labels != IGNORED
        logits, tapped = read_questions(self.model, batch.tokens, batch.questions, select, taps)
        loss = F.cross_entropy(logits.float(), batch.labels[select])
        losses = {"answer": loss.item()}
        verdicts = list(zip(batch.types, judge_answers(logits.detach(), batch.labels), strict=True))
        for name, (own, right) in measure_links(self.readings, tapped, batch.links, tuple(stage.links)).items():
            loss = loss + stage.links[name] * own
            losses[name] = own.item()
            if name == "later":
                verdicts += [(name, ok) for ok in right[:, 0].tolist()]
        return Outcome(loss, verdicts, losses)

    def _ask_whole(self, rng: np.random.Generator, progress: float) -> Outcome:
        batch = make_batch(rng, self.composer, WHOLE, progress)
        loss, right = answer(self.model, batch)
        verdicts = [(f"whole_{kind}", ok) for kind, ok in zip(batch.types, right, strict=True)]
        return Outcome(loss, verdicts, {"answer_whole": loss.item()})

    @torch.no_grad()
    def measure(self, stage: OrderStage) -> Mapping[str, Any]:
        """Accuracy by place of the evidence and type in crowded videos, the whole cache read."""
        if stage.name == CLOCK.name:
            return {}
        found: dict[str, dict[str, float]] = {}
        weights = dict.fromkeys((*MEASURED, *MEASURED_CONTENT), 1.0)
        for number, place in enumerate(PLACES):
            rng = np.random.default_rng([self.seed, self.stream, 100 + number])
            scene = replace(HELD_OUT, place=place)
            held_out = OrderStage("held out", 0, 0.0, weights, {}, scene=scene, shift=0.0, full_mass=1.0)
            tally: dict[str, list[bool]] = {}
            for _ in range(self.held_out_batches):
                batch = make_order_batch(rng, self.composer, held_out, 0.0)
                logits = compute_logits(self.model, batch.tokens, batch.questions, batch.labels != IGNORED)
                for kind, ok in zip(batch.types, judge_answers(logits, batch.labels), strict=True):
                    tally.setdefault(kind, []).append(ok)
            found[place] = {kind: round(float(np.mean(ok)), 3) for kind, ok in sorted(tally.items())}
        return {"held_out": found}
