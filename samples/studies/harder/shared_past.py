"""Give 6,000 tokens to streams of 150,000 that share their past: what is kept, and what the model
can read of it.

    python shared_past.py ROWS.jsonl FOLDER [NAME ...]   # of `MEMORIES`; run again, it goes on
    python shared_past.py --report ROWS.jsonl            # the table of README.md

Minute m of the past is minute m of world m modulo 8. The past is watched once under each memory and
saved in the folder; from that state each of the first four worlds goes on by itself: a minute of
distraction, its evidence, and 20 minutes of distraction. The worlds are the first eight study seeds
behind those of `long-budget` with the same shapes as evidence and the same one that never appears,
so that no minute of one holds what another is asked about. Steps are taken four at a time, as
`ingest` reads a file. Every question is asked twice: of all that is held, and of what came in the
last 25 minutes alone."""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

import protokv
from protokv.core.backbone import Backbone
from protokv.core.context import Context, SlotContext
from protokv.core.decoding import Decoding
from protokv.core.step import StepTokens
from protokv.memories import MemoryConfig
from protokv.replay.metrics import bound_share
from protokv.replay.questions import is_expected_answer
from protokv.stream.session import Session
from protokv.video import VideoStep
from protokv.video.sampling import group_frames, sample_frames
from protokv.video.source import Frame
from samples.worlds.streams import Worlds, WorldStream

SEEDS: Final = (5004091, 5004192, 5004347, 5004363, 5004379, 5004398, 5004580, 5004611)
ASKED: Final = SEEDS[:4]
TYPES: Final = {"colour", "where", "whether"}
PAST_S = 256 * 60
SAVED_S = 32 * 60
TOGETHER = 4
NEWEST_S = 25 * 60
DELAYS_S: Final = (0, 600, 1200)  # behind the end of the evidence
WORLDS: Final = Worlds(
    length_s=PAST_S + 60 + 16 + DELAYS_S[-1] + 4,
    distractor_rate=20.0,
    distractor_similarity=0.5,
    before=PAST_S + 60,
    per_type=4,
)
_TUNED: Final = {"kept_share": 0.95, "redundancy_share": 1.0, "recent_share": 0.125}
_ATTENTION: Final = {"kept_share": 0.9, "shallow_share": 0.0, "deep_share": 1.0}
MEMORIES: Final[dict[str, tuple[str, int, dict[str, float]]]] = {
    "durable": ("durable", 6000, {}),
    "infinipot-v, tuned": ("infinipot-v", 6000, _TUNED),
    "infinipot-v, tuned, as many bytes": ("infinipot-v", 1840, _TUNED),
    "sliding-window": ("sliding-window", 6000, {}),
    "durable, 1,000": ("durable", 1000, {}),
    "infinipot-v, tuned, 1,000": ("infinipot-v", 1000, _TUNED),
    "hermes, tuned": ("hermes", 6000, _ATTENTION),
    "continuity": ("continuity", 6000, {}),
    "first-tokens": ("first-tokens", 6000, {}),
    "random": ("random", 6000, {}),
}


def configure(name: str) -> MemoryConfig:
    """Return the settings of one memory."""
    kind, budget, own = MEMORIES[name]
    return MemoryConfig.of(kind, budget=budget).with_fields({"positions": "compact"} | own)


def draw(streams: Sequence[WorldStream], begin_s: int, end_s: int) -> Iterator[VideoStep]:
    """Yield the steps of some time; each minute is of the next stream."""
    times = (k / 2 for k in range(2 * begin_s, 2 * end_s))
    frames = (Frame(t, streams[int(t // 60) % len(streams)].world.frame(t), 0.5) for t in times)
    return group_frames(sample_frames(frames, 2.0, begin_s), 2)


def take_all(
    sessions: dict[str, Session], steps: Iterator[VideoStep], spent: dict[str, float]
) -> Iterator[int]:
    """Give steps to every session, some together; yield the time of the stream whenever they are
    taken.
    """
    waiting: list[tuple[StepTokens, float]] = []
    for step in steps:
        waiting.append((next(iter(sessions.values())).embed(step.images, step.time_s), step.time_s))
        if len(waiting) == TOGETHER:
            for name, session in sessions.items():
                began = time.process_time()
                session.take([tokens for tokens, _ in waiting], [start_s for _, start_s in waiting])
                spent[name] += time.process_time() - began
            waiting.clear()
            yield round(step.time_s) + 1


def watch_past(backbone: Backbone, names: Sequence[str], folder: Path) -> None:
    """Watch the past, or what is left of it, and save every session now and then and at its end."""

    def file(name: str, time_s: int) -> Path:
        return folder / f"{name}-{time_s}.safetensors"

    saved = (t for t in range(PAST_S, 0, -SAVED_S) if all(file(name, t).exists() for name in names))
    begin_s = next(saved, 0)
    spent = dict.fromkeys(names, 0.0)
    sessions = {
        name: protokv.load(file(name, begin_s), backbone)
        if begin_s
        else Session.start(backbone, configure(name), fps=2.0)
        for name in names
    }
    streams = [WorldStream(seed, WORLDS) for seed in SEEDS] if begin_s < PAST_S else []
    for now_s in take_all(sessions, draw(streams, begin_s, PAST_S), spent) if streams else ():
        if now_s % SAVED_S == 0:
            for name, session in sessions.items():
                protokv.save(session, file(name, now_s))
            told = {
                name: round(1e3 * found / (now_s - begin_s), 1) for name, found in spent.items()
            }
            print(f"{now_s // 60} of {PAST_S // 60} minutes, CPU ms a step: {told}", flush=True)


def go_on(
    backbone: Backbone, seed: int, names: Sequence[str], folder: Path
) -> Iterator[dict[str, Any]]:
    """Go on from the past in one world; yield a row for each delay and memory."""
    stream = WorldStream(seed, WORLDS)
    config = stream.world.config
    end_s = config.before_s + config.evidence_s
    events = [event for event in stream.world.events() if config.before_s <= event.start_s < end_s]
    sessions = {
        name: protokv.load(folder / f"{name}-{PAST_S}.safetensors", backbone) for name in names
    }
    for now_s in take_all(
        sessions, draw([stream], PAST_S, int(stream.length_s)), dict.fromkeys(names, 0.0)
    ):
        for name, session in sessions.items() if now_s - end_s in DELAYS_S else ():
            yield {
                "seed": seed,
                "memory": name,
                "budget": session.config.budget,
                "delay_s": now_s - end_s,
                "state_bytes": session.state_bytes,
                "evidence_tokens": [
                    9 * round(event.end_s - event.start_s // 1) for event in events
                ],
                "slots": count_slots(
                    session, [(event.start_s // 1, event.end_s) for event in events]
                ),
                "answers": [
                    {
                        "type": question.type,
                        "question": question.text,
                        "expected": question.answer,
                        "all": answer(session, question.text, None),
                        "newest": answer(session, question.text, NEWEST_S),
                    }
                    for question in stream.questions
                    if question.type in TYPES
                ],
            }


def hide_older(context: Context, seconds: int | None) -> Context:
    """Return a context without what came more than some seconds before its newest token; a step is
    a second.
    """
    if seconds is None:
        return context
    assert isinstance(context, SlotContext)
    time = context.positions()[..., 0]
    live = context.bias > -torch.inf
    live[..., : context.far.start] = False
    old = live & (time <= int(time.masked_fill(~live, -1).max()) - seconds)
    return replace(context, bias=context.bias.masked_fill(old, -torch.inf), wide=None)


def answer(session: Session, text: str, seconds: int | None) -> str:
    """Ask a session of all that it holds, or of what came in its last seconds."""
    kind = type(session.memory)
    own = kind.context
    with patch.object(kind, "context", lambda memory: hide_older(own(memory), seconds)):
        return session.ask(text, Decoding(max_new_tokens=16)).text


def count_slots(session: Session, spans: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Return, for each span, how many slots of every head of every layer have their newest token
    there.
    """
    context = session.memory.recall()
    backbone = session.backbone
    assert isinstance(context, SlotContext)
    found: list[list[int]] = [[] for _ in spans]
    for layer in range(backbone.layers):
        places = context.positions_at(layer)
        live = context.bias[layer] > -torch.inf
        assert places is not None
        live[:, : context.far.start] = False
        times = backbone.stream_times(places, session.clock)
        for own, (start_s, end_s) in zip(found, spans, strict=True):
            own += ((times >= start_s) & (times < end_s) & live).sum(1).tolist()
    return found


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print what each memory holds of the evidence and what is answered, at each delay."""
    cells: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row["memory"], row["delay_s"]].append(row)
    print(
        "| memory | after, s | worlds | heads that hold it | tokens held | answers, of all | of 25 "
        "minutes |"
    )
    print("|---|---|---|---|---|---|---|")
    for (name, delay_s), own in cells.items():
        held = [[slots > 0 for slots in event] for row in own for event in row["slots"]]
        kept = [
            sum(event) / len(event) / tokens
            for row in own
            for event, tokens in zip(row["slots"], row["evidence_tokens"], strict=True)
        ]
        shares = [sum(map(sum, held)) / sum(map(len, held)), sum(kept) / len(kept)]
        told = [tell_share(own, asked) for asked in ("all", "newest")]
        print(
            f"| {name} | {delay_s} | {len(own)} | "
            + " | ".join([*(f"{one:.2f}" for one in shares), *told])
            + " |"
        )


def tell_share(rows: Sequence[dict[str, Any]], asked: str) -> str:
    """Return the share of right answers with its 95 % interval: the wider one of Wilson's and of a
    bootstrap.
    """
    right = {
        str(row["seed"]): [
            is_expected_answer(one[asked], one["expected"]) for one in row["answers"]
        ]
        for row in rows
    }
    flat = [one for found in right.values() for one in found]
    low, high = bound_share(right)
    return f"{sum(flat) / len(flat):.2f} ({low:.2f} to {high:.2f})"


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main(arguments: Sequence[str]) -> None:
    """Run or report."""
    if arguments[0] == "--report":
        report(read(Path(arguments[1])))
        return
    output = Path(arguments[0])
    folder = Path(arguments[1])
    names = list(arguments[2:]) or list(MEMORIES)
    backbone = protokv.load_backbone("protokv/mini", device="cpu")
    folder.mkdir(exist_ok=True)
    watch_past(backbone, names, folder)
    done = {(row["seed"], row["memory"]) for row in read(output)} if output.exists() else set()
    for seed in ASKED:
        if left := [name for name in names if (seed, name) not in done]:
            # The rows of a world are written together.
            rows = list(go_on(backbone, seed, left, folder))
            with output.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main(sys.argv[1:])
