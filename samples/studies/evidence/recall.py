"""Compare merging with pruning: is the evidence of a wrong answer still in memory, and does the
answer attend to it?

    python recall.py ROWS.jsonl                 # watch and ask; continues an interrupted run
    python recall.py --report ROWS.jsonl        # the table of README.md

The streams of `measure.py` and its questions about content, under `durable` (merges), `infinipot-v`
(prunes), and tokens that nothing chose, at four budgets. A head of the layer that reads memory
*holds* the evidence if one of its slots is anchored in the time at which the evidence was visible:
the newest token of the slot is of that event. The answer *attends to* the evidence if one of its
moments overlaps with that time."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import LENGTH_S, SEEDS, hit, interval, read, spans_of

from protokv.backbones import load_backbone
from protokv.core.context import EMPTY_BIAS
from protokv.memories import MemoryConfig
from protokv.replay.questions import is_expected_answer
from protokv.stream.session import Session
from samples.worlds.streams import Worlds, WorldStream, find_group

MEMORIES = ("durable", "infinipot-v", "random", "first-tokens")
BUDGETS = (86, 43, 22, 11)


def watch_and_ask(path: Path, seeds: Sequence[int]) -> None:
    """Append the rows of every world that is missing in the file."""
    done = {(row["seed"], row["budget"]) for row in read(path)} if path.exists() else set()
    backbone = load_backbone("protokv/mini", device="cpu")
    for budget, seed in itertools.product(BUDGETS, seeds):
        if (seed, budget) in done:
            continue
        stream = WorldStream(seed, Worlds(length_s=LENGTH_S, distractor_rate=20.0))
        sessions = {
            name: Session.start(backbone, MemoryConfig.of(name, budget=budget)) for name in MEMORIES
        }
        for step in stream.steps(2.0, 2):
            tokens = sessions[MEMORIES[0]].embed(step.images, step.time_s)
            for session in sessions.values():
                session.take([tokens], [step.time_s])
        rows = [
            {"seed": seed, "memory": name, "budget": budget} | row
            for name, session in sessions.items()
            for row in ask(stream, session)
        ]
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def ask(stream: WorldStream, session: Session) -> Iterator[dict[str, Any]]:
    """Ask every question about content whose evidence was visible."""
    for question in stream.questions:
        spans = spans_of(stream, question.reference_s)
        if not spans or find_group(question.type) != "content":
            continue
        answer = session.ask(question.text, evidence=True)
        assert answer.evidence is not None
        yield {
            "type": question.type,
            "question": question.text,
            "answer": answer.text,
            "correct": is_expected_answer(answer.text, question.answer),
            "true": spans,
            "held": held_by(session, spans),
            "moments": [[m.start_s, m.end_s, round(m.share, 4)] for m in answer.evidence.spans],
        }


def held_by(session: Session, spans: Sequence[Sequence[float]]) -> float:
    """Return the share of the heads of the reading layers with a slot that is anchored in one of
    the spans.
    """
    backbone = session.backbone
    context = session.memory.recall()
    heads: list[bool] = []
    for layer in backbone.reading_layers or range(backbone.layers):
        places = context.positions_at(layer)
        assert places is not None
        times = backbone.stream_times(places, session.clock)
        query = torch.zeros(backbone.kv_heads, 1, backbone.head_size)
        shown = torch.cat([segment.bias for segment in context.at(layer, query)], 1) > EMPTY_BIAS
        shown[:, : len(backbone.prefix_ids)] = False
        inside = torch.stack([(times >= start) & (times < end) for start, end in spans]).any(0)
        heads += (inside & shown).any(1).tolist()
    return sum(heads) / len(heads)


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print("| tokens | memory | | n | right | held by all heads | by one | by none | attended to |")
    print("|---|---|---|---|---|---|---|---|---|")
    for budget, name in itertools.product(BUDGETS, MEMORIES):
        own = [row for row in rows if row["memory"] == name and row["budget"] == budget]
        for kind, some in (
            ("all answers", own),
            ("right", [row for row in own if row["correct"]]),
            ("wrong", [row for row in own if not row["correct"]]),
        ):
            cells = [
                interval([row["correct"] for row in some]),
                interval([row["held"] == 1 for row in some]),
                interval([0 < row["held"] < 1 for row in some]),
                interval([row["held"] == 0 for row in some]),
                interval([hit(row, 3) for row in some]),
            ]
            print(f"| {budget} | {name} | {kind} | {len(some)} | {' | '.join(cells)} |")


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
