"""Measure how well the moments behind an answer show where its evidence was, and if the answer is
right.

    python measure.py ROWS.jsonl                # watch and ask; continues an interrupted run
    python measure.py --report ROWS.jsonl       # the tables of README.md

Worlds of four minutes with the evidence in a mixture of places, 20 distracting events a minute,
`durable` at three budgets. Each world has the questions of the delay study, and two about a shape
that it never shows. The seeds lie in the range of the studies (`samples.seeds`), behind those of
the delay study; layers and shares were fitted on others."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protokv.backbones import load_backbone
from protokv.memories import DurableConfig
from protokv.replay.questions import is_expected_answer
from protokv.stream.evidence import LEAST_EVIDENCE_SHARE
from protokv.stream.session import Session
from samples.seeds import STUDY
from samples.worlds.pictures import SHAPES
from samples.worlds.streams import Worlds, WorldStream, find_group

SEEDS = STUDY[1000:1016]
BUDGETS = (86, 22, 9)
LENGTH_S = 240


def watch_and_ask(path: Path, seeds: Sequence[int]) -> None:
    """Append the rows of every world that is missing in the file; the rows of a world are written
    together.
    """
    done = {row["seed"] for row in read(path)} if path.exists() else set()
    backbone = load_backbone("protokv/mini", device="cpu")
    for seed in (seed for seed in seeds if seed not in done):
        stream = WorldStream(seed, Worlds(length_s=LENGTH_S, distractor_rate=20.0))
        world = stream.world
        shown = {event.shape for event in world.events()}
        never = next(name for shape, name in enumerate(SHAPES) if shape not in shown)
        asked: list[tuple[str, str, str | None, Any]] = [
            (q.type, q.text, q.answer, spans_of(stream, q.reference_s)) for q in stream.questions
        ]
        for text in (f"What colour was the {never}?", f"Where was the {never}?"):
            asked.append(("never shown", text, None, []))
        sessions = [Session.start(backbone, DurableConfig(budget=budget)) for budget in BUDGETS]
        for step in stream.steps(2.0, 2):
            tokens = sessions[0].embed(step.images, step.time_s)
            for session in sessions:
                session.take([tokens], [step.time_s])
        rows = []
        for session in sessions:
            for kind, text, expected, spans in asked:
                answer = session.ask(text, evidence=True)
                assert answer.evidence is not None
                rows.append(
                    {
                        "seed": seed,
                        "budget": session.config.budget,
                        "type": kind,
                        "question": text,
                        "expected": expected,
                        "answer": answer.text,
                        "correct": expected is not None
                        and is_expected_answer(answer.text, expected),
                        "mean_logprob": round(answer.mean_logprob, 4),
                        "true": spans,
                        "moments": [
                            [m.start_s, m.end_s, round(m.share, 4)] for m in answer.evidence.spans
                        ],
                    }
                )
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def spans_of(stream: WorldStream, seen_s: float) -> list[list[float]]:
    """Return when the deciding event was visible, at each showing; none for a "no"."""
    world = stream.world
    start_s, *again = world.config.showings
    shift = again[0] - start_s if again else 0
    events = [e for e in world.events() if start_s <= e.start_s < start_s + world.config.evidence_s]
    return [
        [e.start_s + later, e.end_s + later]
        for e in events
        if e.end_s + shift == seen_s
        for later in sorted({0, shift})
    ]


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print both tables."""
    placed = [row for row in rows if row["true"]]
    unseen = [row for row in rows if row["type"] == "never shown"]
    right = [row for row in placed if row["correct"]]
    print(
        "| right answers | n | true time is the first moment | among the three |\n|---|---|---|---|"
    )
    groups = {"content": "content", "order": "order", "all": ""}
    for name, group in groups.items():
        some = [row for row in right if not group or find_group(row["type"]) == group]
        print(f"| {name} | {len(some)} | {share(some, 1)} | {share(some, 3)} |")
    for budget in BUDGETS:
        some = [row for row in right if row["budget"] == budget]
        print(f"| budget {budget} | {len(some)} | {share(some, 1)} | {share(some, 3)} |")
    print(
        "\n| AUC of the share | n | right from wrong | n never shown | right from never shown "
        "|\n|---|---|---|---|---|"
    )
    for name, picked in [("all", BUDGETS), *((f"budget {b}", (b,)) for b in BUDGETS)]:
        good, bad, none = (
            [row for row in some if row["budget"] in picked]
            for some in (right, [row for row in placed if not row["correct"]], unseen)
        )
        print(
            f"| {name} | {len(good)} + {len(bad)} | {auc(good, bad)} | {len(none)} | "
            f"{auc(good, none)} |"
        )
    print(f"\n| share below {LEAST_EVIDENCE_SHARE:.0%} | n | |\n|---|---|---|")
    wrong = [row for row in placed if not row["correct"]]
    for name, some in (("right", right), ("wrong", wrong), ("never shown", unseen)):
        print(
            f"| {name} | {len(some)} | "
            f"{interval([strength(row) < LEAST_EVIDENCE_SHARE for row in some])} |"
        )


def hit(row: dict[str, Any], most: int) -> bool:
    """Return True if one of the first moments overlaps with a time at which the evidence was
    visible.
    """
    return any(
        a < end and start < b for a, b, _ in row["moments"][:most] for start, end in row["true"]
    )


def strength(row: dict[str, Any]) -> float:
    """Return the share of the strongest moment."""
    return float(row["moments"][0][2]) if row["moments"] else 0.0


def share(rows: Sequence[dict[str, Any]], most: int) -> str:
    """Return the share of rows that `hit`, with its interval."""
    return interval([hit(row, most) for row in rows])


def interval(found: Sequence[bool]) -> str:
    """Return a share with Wilson's 95 % interval."""
    n = len(found)
    if not n:
        return "-"
    p = sum(found) / n
    z = 1.96
    middle = (p + z * z / 2 / n) / (1 + z * z / n)
    half = z * np.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    half /= 1 + z * z / n
    return f"{p:.2f} ({max(0.0, middle - half):.2f} to {min(1.0, middle + half):.2f})"


def auc(good: Sequence[dict[str, Any]], bad: Sequence[dict[str, Any]]) -> str:
    """Return how often a good row is stronger than a bad one, with an interval by bootstrap over
    worlds.
    """
    seeds = sorted({row["seed"] for row in [*good, *bad]})
    rng = np.random.default_rng(0)
    drawn = []
    by_seed = {
        seed: [[strength(r) for r in rows if r["seed"] == seed] for rows in (good, bad)]
        for seed in seeds
    }
    for world in [seeds, *(list(rng.choice(seeds, len(seeds))) for _ in range(500))]:
        one, two = (np.array([x for seed in world for x in by_seed[seed][side]]) for side in (0, 1))
        if len(one) and len(two):
            above = (one[:, None] > two).mean() + (one[:, None] == two).mean() / 2
            drawn.append(float(above))
    if not drawn:
        return "-"
    low, high = np.quantile(drawn[1:], [0.025, 0.975])
    return f"{drawn[0]:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--worlds", type=int, default=len(SEEDS))
    options = parser.parse_args()
    if options.report:
        report(read(options.rows))
    else:
        watch_and_ask(options.rows, SEEDS[: options.worlds])
