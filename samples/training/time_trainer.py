"""Train a model of order to read one shape over time, on the stages of `time_curriculum`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from samples.training.batches import IGNORED
from samples.training.forward import normalise, read_questions
from samples.training.gaze import measure_gaze, measure_miss, read_gaze
from samples.training.links import Link, read_link
from samples.training.model import TOKENS
from samples.training.order_batches import OrderBatch, make_order_batch
from samples.training.order_curriculum import HELD_OUT_STAGE, OrderStage
from samples.training.order_trainer import OrderTrainer, weigh
from samples.training.repeated import PAIRS
from samples.training.surgery import insert_layers, tell_words_apart
from samples.training.time_curriculum import GATHER, ONSET
from samples.training.time_links import TIME_LINKS
from samples.training.time_surgery import (
    GATHER_LAYER,
    ONSET_LAYER,
    TIME_INSERTED,
    TIME_READING_LAYER,
    UNLIT,
    fit,
    look_at_lead,
    look_for_events,
    look_for_predecessors,
    make_codes,
)
from samples.training.traces import measure_traces
from samples.training.visual_tokens import N_PREFIX
from samples.training.vocabulary import token_ids
from samples.worlds.phrases import TIME_TYPES
from samples.worlds.pictures import SHAPES

LEAD_GROUP: Final = 1
"""The group of heads of the first layer that attends to the word in front of a shape word."""

LATEST_LAYER: Final = 5
LATEST_HEADS: Final = 2
"""The layer, and the number of its heads (those of one key), that must find the last event of a
shape.
"""

_EXAMPLES: Final = 6
"""Batches from which the readings of a new layer are fitted."""


class TimeTrainer(OrderTrainer):
    """A model with two more layers than one that reads order."""

    stream: ClassVar[int] = 22
    links: ClassVar[Mapping[str, Link]] = TIME_LINKS

    def make_model(
        self, state: Mapping[str, Tensor], seed: int
    ) -> Qwen2_5_VLForConditionalGeneration:
        """Make the model with the new layers in front of those that read order."""
        model = insert_layers(state, seed, inserted=TIME_INSERTED, reading=TIME_READING_LAYER)
        tell_words_apart(model.model.language_model.embed_tokens.weight, seed, "order", "time")
        return model

    def begin(self, stage: OrderStage) -> None:
        """Set where a new layer attends, and train the parameters that the stage names."""
        super().begin(stage)
        if stage.name == ONSET.name:
            self._prepare_onset(stage)
        elif stage.name == GATHER.name:
            self._prepare_gather(stage)
        self.optimizer.adopt()

    @torch.no_grad()
    def _read_examples(
        self, stage: OrderStage, layer: int
    ) -> tuple[list[OrderBatch], list[Tensor]]:
        """Return batches, and the normalised states `[B, L, hidden]` that a layer reads."""
        rng = np.random.default_rng([self.seed, self.stream, 200 + layer])
        shown = replace(stage, window=0.0, far=0.0, drop=0.0)
        batches = [make_order_batch(rng, self.composer, shown, 0.0) for _ in range(_EXAMPLES)]
        states = []
        for batch in batches:
            select = batch.labels != IGNORED
            _, tapped = read_questions(
                self.model, batch.tokens, batch.questions, select, (layer,), layer
            )
            states.append(normalise(tapped[layer]))
        return batches, states

    def _prepare_onset(self, stage: OrderStage) -> None:
        """Fit the readings of the cell of lit tokens and of the first word, and set the layer of
        beginnings.
        """
        states = []
        told = []
        codes = make_codes(TOKENS)
        for batch, state in zip(*self._read_examples(stage, ONSET_LAYER), strict=True):
            nv = N_PREFIX + batch.tokens.times.shape[1]
            lit = find_bits(batch, "lit")
            bits = torch.cat([codes[batch.tokens.cells] * lit, lit, torch.zeros_like(lit)], -1)
            shown = state[:, N_PREFIX:nv]
            present = find_present(batch)
            bits = bits[present]
            shown = shown[present]
            words = torch.cat([state[:, :N_PREFIX], state[:, nv:]], 1).flatten(0, 1)[
                : len(bits) // 8
            ]
            states += [shown, words]
            told += [bits, torch.eye(bits.shape[-1])[-1].expand(len(words), -1)]
        cells, lit, sink = torch.split(
            fit(torch.cat(states), torch.cat(told)), [codes.shape[1], 1, 1], 1
        )
        text = self.model.config.text_config
        attention = self.model.model.language_model.layers[ONSET_LAYER].self_attn
        theta = text.rope_parameters["rope_theta"]
        look_for_predecessors(attention, theta, cells, lit, sink, self.seed)
        look_at_lead(attention, theta, LEAD_GROUP, self.seed)

    def _prepare_gather(self, stage: OrderStage) -> None:
        """Fit the readings of shapes from words and of the first word, and set the layer that
        gathers events.
        """
        embedding = self.model.model.language_model.embed_tokens.weight.detach()
        is_shape = torch.zeros(len(embedding), len(SHAPES))
        is_shape[[token_ids()[shape] for shape in SHAPES], range(len(SHAPES))] = 1
        code = dict(self.readings["code"].named_parameters())
        events = (
            TIME_LINKS["code"].gain * torch.cat([code["weight"].T, code["bias"][None]]).detach()
        )
        states = []
        first = []
        words = []
        followed = []
        for batch, state in zip(*self._read_examples(stage, GATHER_LAYER), strict=True):
            seen = state[:, : N_PREFIX + batch.tokens.times.shape[1]]
            wanted = torch.zeros(*seen.shape[:2], 1)
            wanted[:, 0] = 1
            wanted[:, N_PREFIX:] = UNLIT * (1 - find_bits(batch, "lit"))
            shown = torch.ones(seen.shape[:2], dtype=torch.bool)
            shown[:, N_PREFIX:] = find_present(batch)
            states.append(seen[shown])
            first.append(wanted[shown])
            videos, positions, bits = batch.links["follows"]
            words.append(state[videos, positions])
            followed.append(bits)
        attention = self.model.model.language_model.layers[GATHER_LAYER].self_attn
        sink = fit(torch.cat(states), torch.cat(first), 0.3)
        follows = fit(torch.cat(words), torch.cat(followed), 0.3)
        look_for_events(
            attention, fit(normalise(embedding), is_shape, 0.3), follows, events, sink, self.seed
        )

    def teach(
        self,
        batch: OrderBatch,
        tapped: Mapping[int, Tensor],
        stage: OrderStage,
        loss: Tensor,
        losses: dict[str, float],
    ) -> tuple[Tensor, list[tuple[str, bool]]]:
        """Teach the links of order, the codes, and the attention of shape words."""
        loss, verdicts = super().teach(batch, tapped, stage, loss, losses)
        loss = weigh(stage, self._tell_numbers(batch, tapped, stage), loss, losses)
        if "traces" in stage.links:
            traces, sizes = self._measure_traces(
                batch, tapped[GATHER_LAYER + 1] - tapped[ONSET_LAYER]
            )
            loss = loss + stage.links["traces"] * traces
            losses |= sizes
        return weigh(stage, self._look(batch, tapped, stage), loss, losses), verdicts

    def _tell_numbers(
        self, batch: OrderBatch, tapped: Mapping[int, Tensor], stage: OrderStage
    ) -> dict[str, Tensor]:
        """Return the squared errors of the numbers that visual tokens predict."""
        found = {}
        present = find_present(batch)
        nv = N_PREFIX + present.shape[1]
        for name, told_as in (("code", "onset"), ("marks", "marks")):
            if name in stage.links:
                link = self.links[name]
                told = read_link(link, self.readings[name], tapped[link.layer][:, N_PREFIX:nv])
                found[name] = (told - find_bits(batch, told_as)).square().sum(-1)[present].mean()
        return found

    def _look(
        self, batch: OrderBatch, tapped: Mapping[int, Tensor], stage: OrderStage
    ) -> dict[str, Tensor]:
        """Return the distance of the attention of shape words in questions over time from the
        wanted attention.
        """
        found: dict[str, Tensor] = {}
        over_time = batch.links.get("until")
        if over_time is None:
            return found
        nv = N_PREFIX + batch.tokens.times.shape[1]
        rows = over_time.videos, over_time.positions
        words = batch.questions.flatten(1)[rows[0], rows[1] - nv]
        shape = (
            torch.tensor([token_ids()[shape] for shape in SHAPES])
            .eq(words[:, None])
            .int()
            .argmax(-1)
        )
        seen = partial(
            read_gaze, self.model, tokens=batch.tokens, questions=batch.questions, rows=rows
        )
        if "look_events" in stage.links:
            wanted = torch.zeros(len(words), nv)
            wanted[:, N_PREFIX:] = find_bits(batch, "onset")[rows[0], :, shape]
            wanted[:, 0] = 1
            found["look_events"] = measure_gaze(
                seen(layer=GATHER_LAYER, state=tapped[GATHER_LAYER]), wanted
            )
        if "look_latest" in stage.links:
            latest = torch.zeros(len(words), nv)
            latest[:, N_PREFIX:] = find_bits(batch, "latest")[rows[0], :, shape]
            group = seen(layer=LATEST_LAYER, state=tapped[LATEST_LAYER])[:, :LATEST_HEADS]
            found["look_latest"] = measure_miss(group, latest)
        return found

    def _measure_traces(self, batch: OrderBatch, moved: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Measure the changes by the new layers, except on shape words that may be asked about over
        time.
        """
        lit = find_bits(batch, "lit")[..., 0] > 0
        videos, positions, bits = batch.links["follows"]
        followed = bits[:, 0] > 0
        written = batch.questions.flatten(1) != 0
        return measure_traces(
            moved, lit, find_present(batch), written, (videos[followed], positions[followed])
        )

    @torch.no_grad()
    def measure(self, stage: OrderStage) -> Mapping[str, Any]:
        """Measure as for order, and by type with recurring shapes, with a crossing one, and with
        all shown twice.
        """
        if stage.quiet:
            return {}
        over_time = replace(HELD_OUT_STAGE, weights=dict.fromkeys(TIME_TYPES, 1.0), recurring=1.0)
        shown = {
            "again": over_time,
            "crossing": replace(over_time, crossing=1.0),
            "twice": replace(HELD_OUT_STAGE, weights=dict.fromkeys(PAIRS, 1.0), repeated=1.0),
        }
        return {"held_out": super().measure(stage)["held_out"] | self.answer_each(shown, 110)}

    def find_taps(self, stage: OrderStage) -> set[int]:
        """Return the taps for order, and the inputs of the layers that attend to events."""
        gazes = {"look_events": GATHER_LAYER, "look_latest": LATEST_LAYER}
        return super().find_taps(stage) | {
            layer for name, layer in gazes.items() if name in stage.links
        }


def find_present(batch: OrderBatch) -> Tensor:
    """Return `[B, N]`, true for visual tokens that are not padding."""
    present = batch.tokens.present
    return torch.ones_like(batch.tokens.times, dtype=torch.bool) if present is None else present


def find_bits(batch: OrderBatch, name: str) -> Tensor:
    """Return the bits of a link of visual tokens as `[B, N, size]`, 0 without a label."""
    videos, positions, bits = batch.links[name]
    found = torch.zeros(*batch.tokens.times.shape, bits.shape[1])
    found[videos, positions - N_PREFIX] = bits
    return found
