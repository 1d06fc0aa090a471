"""Held-out accuracy by question type and context length, on rendered worlds.

Run: `python -m samples.training.evaluate`.

Worlds of 8 to 256 steps have few events, many events, or evidence before a crowd. The model reads
them in four ways:

- "full": every token sees all earlier tokens;
- "window": visual tokens see the last 8 steps, and the question sees all;
- "holes": as "window", with three quarters of the empty steps hidden from the question;
- "recent": the question sees the last 4 steps only, as without a memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini.backbone import MiniBackbone
from samples.questions import CHANCE
from samples.seeds import CARD, DEMONSTRATION, DEVELOPMENT, STUDY
from samples.training.batches import IGNORED, judge_answers, write_question
from samples.training.forward import QUESTION_TOKENS, compute_logits, encode_steps, to_patches
from samples.training.model import TOKENS
from samples.training.visual_tokens import show_whole_steps
from samples.worlds.phrases import TYPES
from samples.worlds.questions import find_facts, phrase, pick
from samples.worlds.world import World, WorldConfig

LENGTHS: Final = (8, 32, 64, 128, 256)
LOADS: Final = ("few", "many", "crowd")
WAYS: Final = ("full", "window", "holes")
WINDOW: Final = 8
CROWD_FROM: Final = 32
"""The shortest stream, in steps, with room for evidence and a crowd behind it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: accuracy and number of questions by type."""

    load: str
    length: int
    way: str
    accuracy: dict[str, float]
    asked: dict[str, int]


def make_held_out_world(load: str, length: int, index: int) -> World:
    """Make world number `index` of a table cell.

    "few" has 1 to 4 events. "many" has 6 to 24 if they fit, and questions about any of them.
    "crowd" has 4 events of evidence in the first quarter, at most a minute, and then 12 distracting
    events a minute.
    """
    seed = CARD.start + 10_000 * length + index
    if load == "crowd":
        first_s = min(60, max(16, length // 4))
        return World(WorldConfig(seed, length, 12.0, evidence_events=4, evidence_s=first_s))
    rng = np.random.default_rng([seed, 30])
    least, most = (1, 4) if load == "few" else (6, max(6, min(24, length // 3)))
    while True:
        target = int(rng.integers(least, most + 1))
        drawn = int(rng.integers(2**40))
        if any(drawn in taken for taken in (DEMONSTRATION, DEVELOPMENT, STUDY)):
            continue
        world = World(WorldConfig(drawn, length, min(40.0, 60 * target / length)))
        # Rates are rounded at random, and short streams hold fewer events, so draw until the number
        # fits.
        if min(least, 5) <= len(world.events_until(length)) <= most:
            return world


@torch.no_grad()
def evaluate(
    model: Qwen2_5_VLForConditionalGeneration,
    *,
    lengths: Sequence[int] = LENGTHS,
    loads: Sequence[str] = LOADS,
    ways: Sequence[str] = WAYS,
    n: int = 96,
    types: Sequence[str] = TYPES,
) -> Iterable[Cell]:
    """Score every load, length and way, with at least `n` questions of each type if the worlds
    allow that many.
    """
    dtype = model.lm_head.weight.dtype
    for load in loads:
        for length in lengths:
            if load == "crowd" and length < CROWD_FROM:
                continue
            wanted = [t for t in types if not (t == "count" and load != "few")]
            tallies: dict[str, dict[str, list[int]]] = {
                way: {t: [0, 0] for t in wanted} for way in ways
            }
            index = 0
            # Some worlds have no question of some type, so go on until each type has n, within a
            # limit.
            while index < 4 * n and any(pair[0] < n for pair in tallies[ways[0]].values()):
                _one_world(
                    model, dtype, make_held_out_world(load, length, index), wanted, tallies, n
                )
                index += 1
            for way in ways:
                asked = {t: pair[0] for t, pair in tallies[way].items() if pair[0]}
                yield Cell(
                    load, length, way, {t: tallies[way][t][1] / asked[t] for t in asked}, asked
                )


def _one_world(
    model: Qwen2_5_VLForConditionalGeneration,
    dtype: torch.dtype,
    world: World,
    wanted: Sequence[str],
    tallies: dict[str, dict[str, list[int]]],
    n: int,
) -> None:
    K = world.config.length_s
    events = world.events_until(K)
    rng = np.random.default_rng([world.config.seed, 31])
    asked: list[str] = []
    ids = np.zeros((len(wanted), QUESTION_TOKENS), np.int64)
    labels = np.full(ids.shape, IGNORED, np.int64)
    first_way = next(iter(tallies))
    for kind in wanted:
        found = find_facts(kind, events, K)
        if found and tallies[first_way][kind][0] < n:
            fact = pick(rng, found)
            write_question(
                ids[len(asked)], labels[len(asked)], phrase(rng, kind, fact), fact.answer
            )
            asked.append(kind)
    if not asked:
        return
    questions = torch.from_numpy(ids[None, : len(asked)])
    truth = torch.from_numpy(labels[None, : len(asked)])
    frames = torch.from_numpy(world.frames(0, K)).view(K, 2, 84, 84, 3)
    features = torch.cat(
        [encode_steps(model.model.visual, to_patches(f, dtype)) for f in torch.split(frames, 128)]
    )
    lit = np.zeros((K, TOKENS), np.bool_)
    for event in events:
        lit[int(event.start_s) : int(event.end_s), event.place] = True
    recent = np.arange(K) >= K - 4
    kept = lit.any(1) | (np.arange(K) >= K - 2) | (rng.random(K) < 0.25)
    for way, tally in tallies.items():
        seen = {"holes": kept, "recent": recent}.get(way)
        logits = compute_logits(
            model,
            show_whole_steps(
                features.view(1, K * TOKENS, -1),
                torch.arange(K)[None],
                torch.tensor([K]),
                window=None if way == "full" else WINDOW,
                seen=None if seen is None else torch.from_numpy(np.repeat(seen, TOKENS))[None],
            ),
            questions,
            truth != IGNORED,
        )
        for kind, ok in zip(asked, judge_answers(logits, truth), strict=True):
            tally[kind][0] += 1
            tally[kind][1] += ok


def format_table(cells: Iterable[Cell], types: Sequence[str] = TYPES) -> Iterable[str]:
    """Yield the lines of a Markdown table as the cells arrive; the first row is chance."""
    yield f"| events | steps | reading | {' | '.join(types)} | mean |"
    yield "|---|---|---|" + "---|" * (len(types) + 1)
    chance = [CHANCE[t] for t in types]
    yield f"| chance | | | {' | '.join(f'{c:.2f}' for c in chance)} | {np.mean(chance):.2f} |"
    for cell in cells:
        scores = [f"{cell.accuracy[t]:.2f}" if t in cell.accuracy else "-" for t in types]
        mean = float(np.mean(list(cell.accuracy.values())))
        yield f"| {cell.load} | {cell.length} | {cell.way} | {' | '.join(scores)} | {mean:.3f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a checkpoint folder."""
    parser = argparse.ArgumentParser(
        prog="python -m samples.training.evaluate", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--model", type=Path, default=MiniBackbone.folder("protokv/mini"), help="checkpoint folder"
    )
    parser.add_argument(
        "--lengths", default=",".join(map(str, LENGTHS)), help="steps, separated by commas"
    )
    parser.add_argument("--loads", default=",".join(LOADS), help="few, many, crowd")
    parser.add_argument("--ways", default=",".join(WAYS), help="full, window, holes, recent")
    parser.add_argument("-n", type=int, default=96, help="questions per type and cell")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    )
    cells = evaluate(
        model.eval(),
        lengths=[int(x) for x in options.lengths.split(",")],
        loads=options.loads.split(","),
        ways=options.ways.split(","),
        n=options.n,
    )
    for line in format_table(cells):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
