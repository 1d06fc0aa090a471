"""Measure how well a checkpoint reads order: accuracy by type and place of the evidence, with
bootstrap intervals.

Run: `python -m samples.training.evaluate_order`.

Frames are rendered, and the model reads the full cache. Types whose words the tokenizer lacks are
not asked. Worlds of one index share their evidence, so the bootstrap draws indices instead of
questions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini.backbone import MiniBackbone
from samples.questions import CHANCE, Question
from samples.training.batches import IGNORED, judge_answers, write_question
from samples.training.forward import QUESTION_TOKENS, compute_logits, encode_steps, to_patches
from samples.training.model import TOKENS
from samples.training.order_worlds import (
    ASKED,
    ASKED_TWICE,
    PLACES,
    TWICE,
    ask_order,
    make_order_world,
)
from samples.training.time_worlds import ask_time, make_time_world
from samples.training.visual_tokens import show_whole_steps
from samples.training.vocabulary import split
from samples.worlds.phrases import TEMPLATES, TIME_TYPES
from samples.worlds.world import World

RESAMPLES: Final = 10_000
BLOCK: Final = 64
"""Questions to read at once. Each block runs the video again; a larger block needs more memory for
attention scores.
"""

EVERY_TYPE: Final = (*ASKED, *TIME_TYPES)
"""The types to ask if the evidence is shown once."""

Verdicts = Mapping[tuple[str, str], NDArray[np.int64]]
"""(type, place) -> right answers and questions of each world, `[worlds, 2]`."""


def find_known_types(folder: Path, kinds: Sequence[str] = EVERY_TYPE) -> tuple[str, ...]:
    """Return those of `kinds` of which the tokenizer in `folder` knows every word.

    All types of time were taught together, so a tokenizer knows the words of all of them or of
    none.
    """
    known = set(
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    )
    fill = {"shape": "", "other": "", "colour": "", "place": ""}
    together = tuple(chain.from_iterable(TEMPLATES[kind] for kind in TIME_TYPES))
    return tuple(
        kind
        for kind in kinds
        for templates in (together if kind in TIME_TYPES else TEMPLATES[kind],)
        if known.issuperset(
            word for template in templates for word in split(template.format(**fill))
        )
    )


@torch.no_grad()
def answer_all(
    model: Qwen2_5_VLForConditionalGeneration, world: World, asked: Sequence[Question]
) -> list[bool]:
    """Ask every question at the end of `world`, and return for each if the answer is right."""
    K = world.config.length_s
    dtype = model.lm_head.weight.dtype
    frames = torch.from_numpy(world.frames(0, K)).view(K, 2, 84, 84, 3)
    features = torch.cat(
        [encode_steps(model.model.visual, to_patches(f, dtype)) for f in torch.split(frames, 128)]
    )
    verdicts: list[bool] = []
    for start in range(0, len(asked), BLOCK):
        some = asked[start : start + BLOCK]
        ids = np.zeros((1, len(some), QUESTION_TOKENS), np.int64)
        labels = np.full(ids.shape, IGNORED, np.int64)
        for i, question in enumerate(some):
            write_question(ids[0, i], labels[0, i], question.question, question.answer)
        truth = torch.from_numpy(labels)
        logits = compute_logits(
            model,
            show_whole_steps(
                features.view(1, K * TOKENS, -1), torch.arange(K)[None], torch.tensor([K])
            ),
            torch.from_numpy(ids),
            truth != IGNORED,
        )
        verdicts += judge_answers(logits, truth)
    return verdicts


def evaluate_order(
    model: Qwen2_5_VLForConditionalGeneration,
    kinds: Sequence[str],
    worlds: int,
    per_type: int = 4,
    places: Sequence[str] = PLACES,
) -> Verdicts:
    """Count right answers and questions by type and place of the evidence, in `worlds` worlds for
    each place.
    """
    in_order, over_time = (
        tuple(kind for kind in kinds if (kind in TIME_TYPES) == about_time)
        for about_time in (False, True)
    )
    tally = {(kind, place): np.zeros((worlds, 2), np.int64) for kind in kinds for place in places}
    for index in range(worlds):
        for place in places:
            order = make_order_world(place, index)
            asked_of = [(order, ask_order(order, in_order, per_type))]
            if over_time:
                time = make_time_world(place, index)
                asked_of.append((time, ask_time(time, over_time)))
            for world, asked in asked_of:
                for question, ok in zip(
                    asked, answer_all(model, world, asked) if asked else [], strict=True
                ):
                    tally[question.type, place][index] += (ok, 1)
    return tally


def bootstrap(
    counts: NDArray[np.int64], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % interval of the accuracy of `counts` `[worlds, 2]` (right, asked), by
    bootstrap over worlds.
    """
    rng = np.random.default_rng(seed)
    # How often each resample draws each world.
    drawn = rng.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), resamples)
    right, asked = (drawn @ counts).T
    low, high = np.quantile(right[asked > 0] / asked[asked > 0], (0.025, 0.975))
    return float(low), float(high)


def format_order_table(verdicts: Verdicts) -> Iterator[str]:
    """Yield the lines of a Markdown table: a row for each type, a column for each place, and one
    for all places.
    """
    places = list(dict.fromkeys(place for _, place in verdicts))
    yield f"| question | chance | {' | '.join(places)} | all | interval | n |"
    yield "|---|---|" + "---|" * (len(places) + 3)
    for kind in dict.fromkeys(kind for kind, _ in verdicts):
        by_place = [verdicts[kind, place] for place in places]
        shown = [f"{c[:, 0].sum() / c[:, 1].sum():.2f}" if c[:, 1].any() else "-" for c in by_place]
        together = np.sum(by_place, axis=0)
        right, asked = together.sum(0)
        if not asked:
            continue
        low, high = bootstrap(together)
        accuracy = f"{right / asked:.3f} | {low:.3f} to {high:.3f}"
        yield f"| {kind} | {CHANCE[kind]:.2f} | {' | '.join(shown)} | {accuracy} | {asked} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a checkpoint folder."""
    parser = argparse.ArgumentParser(
        prog="python -m samples.training.evaluate_order", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--model", type=Path, default=MiniBackbone.folder("protokv/mini"), help="checkpoint folder"
    )
    parser.add_argument(
        "--worlds", type=int, default=64, help="worlds for each place of the evidence"
    )
    parser.add_argument(
        "--twice", action="store_true", help="worlds whose evidence is shown twice, instead"
    )
    parser.add_argument(
        "--types", help="question types, separated by commas (default: all that it has words for)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    )
    asked, places = (ASKED_TWICE, (TWICE,)) if options.twice else (EVERY_TYPE, PLACES)
    kinds = options.types.split(",") if options.types else find_known_types(options.model, asked)
    for line in format_order_table(
        evaluate_order(model.eval(), kinds, options.worlds, places=places)
    ):
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
