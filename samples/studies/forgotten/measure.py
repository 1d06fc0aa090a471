"""Ask about what was shown and about what never was, and compare what is promised with what is
found.

    python measure.py FOLDER                # watch and ask; continues an interrupted run
    python measure.py --report FOLDER       # the tables of README.md

Worlds with 20 distracting events a minute, half of which look like the evidence. Questions about
what a world shows are joined by questions of these types about what it never shows: any answer to
them is wrong. Some worlds calibrate, and others test: of the same kind, twice as long, and with a
quarter of the budget. Questions of another kind are not asked, but refused by their words.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Final

import msgspec
import numpy as np

from protokv.backbones import load_backbone
from protokv.memories import MemoryConfig
from protokv.replay.calibrate import PROMISES, calibrate_answers
from protokv.replay.memories import MemoryVariant
from protokv.replay.questions import ReplayQuestion, plan_asks
from protokv.replay.rows import AnswerRow, AnswerRowFile, read_answer_rows
from protokv.replay.runner import TrialSetup, replay_stream
from samples.seeds import STUDY
from samples.studies.evidence.measure import interval
from samples.worlds.phrases import TEMPLATES
from samples.worlds.pictures import COLOUR_NAMES, PLACES, SHAPES
from samples.worlds.streams import Worlds, WorldStream

MEMORIES: Final = ("durable", "infinipot-v", "sliding-window", "paper", "random")
WORLDS: Final = Worlds(length_s=240, distractor_rate=20.0, distractor_similarity=0.5)
LONGER: Final = msgspec.structs.replace(WORLDS, length_s=480)
NOTHING: Final = "unknown"
BUDGET: Final = 43  # 1/50 of four minutes

SETS: Final = {
    "calibrate": (STUDY[12_000:12_024], WORLDS, BUDGET),
    "same": (STUDY[12_100:12_124], WORLDS, BUDGET),
    "longer": (STUDY[12_200:12_208], LONGER, BUDGET),
    "smaller": (STUDY[12_300:12_308], WORLDS, BUDGET // 4),
}
"""Name -> seeds, worlds and budget; the first one calibrates, and the others test."""


def watch_and_ask(path: Path, name: str) -> None:
    """Append the rows of every world of a set that is missing in the file."""
    seeds, worlds, budget = SETS[name]
    rows = AnswerRowFile(path)
    done = {row.video for row in rows.rows.values()}
    backbone = load_backbone("protokv/mini", device="cpu")
    setup = TrialSetup.of(backbone)
    variants = [MemoryVariant(one, MemoryConfig.of(one, budget=budget)) for one in MEMORIES]
    for stream in (WorldStream(seed, worlds) for seed in seeds):
        if stream.name in done:
            continue
        stream.questions = [
            replace(one, reference_s=stream.length_s, reference="end")
            for one in (*stream.questions, *find_questions_of_nothing(stream))
        ]
        asked = plan_asks(stream.questions, [0.0], stream.length_s)
        answers = setup.plan_answers(stream, asked, variants)
        found = list(replay_stream(backbone, stream, answers, setup))
        for row in found:
            if isinstance(row, AnswerRow):
                rows.append(row)


def find_questions_of_nothing(stream: WorldStream) -> list[ReplayQuestion]:
    """Return a question about what never was for each type that is asked; no answer is right."""
    events = list(stream.world.events())
    colours = {event.colour for event in events}
    rng = np.random.default_rng([stream.world.config.seed, 77])
    shown = sorted({event.shape for event in events})
    free = {
        "shape": [one for n, one in enumerate(SHAPES) if n not in shown],
        "place": [one for n, one in enumerate(PLACES) if n not in {e.place for e in events}],
        "colour": [one for n, one in enumerate(COLOUR_NAMES) if n not in colours],
        "other": [SHAPES[n] for n in shown],
    }
    found = dict[str, ReplayQuestion]()
    for one in stream.questions:
        template = TEMPLATES[one.type][0]
        slots = {name for _, name, _, _ in Formatter().parse(template) if name}
        if one.type == "whether" or not slots or not all(free[name] for name in slots):
            continue
        drawn = {name: free[name][rng.integers(len(free[name]))] for name in sorted(slots)}
        text = template.format(**drawn)
        name = f"never-{len(found)}"
        found.setdefault(text, ReplayQuestion(name, text, NOTHING, one.type, 0.0, "end"))
    return list(found.values())


def report(folder: Path) -> None:
    """Print the tables."""
    rows = {name: read_answer_rows([folder / f"{name}.jsonl.gz"]) for name in SETS}
    made = {one.memory["kind"]: one for one in calibrate_answers(rows.pop("calibrate"))}
    print("| memory | promised | worlds | n | answered | wrong of these | of nothing: withheld |")
    print("|---|---|---|---|---|---|---|")
    for memory, one in made.items():
        for promise in PROMISES:
            least = one.find_threshold(promise)
            if least is None:
                print(f"| {memory} | {promise:.0%} | cannot be promised | | | | |")
                continue
            for name, answers in rows.items():
                own = [row for row in answers if row.memory == memory]
                print(describe(memory, promise, name, own, least))
    for name in ("How many times did the star appear?", "Where did the star end up?"):
        print(f"\n{name} known: {made['durable'].knows(name)}")


def describe(
    memory: str, promise: float, name: str, rows: Sequence[AnswerRow], least: float
) -> str:
    """Return a row of the table."""
    given = [row for row in rows if (row.mean_logprob or 0.0) >= least]
    nothing = [row for row in rows if row.expected == NOTHING]
    withheld = [row for row in nothing if row not in given]
    shares = [
        interval([row in given for row in rows]),
        interval([not row.correct for row in given]),
        interval([row in withheld for row in nothing]),
    ]
    return f"| {memory} | {promise:.0%} | {name} | {len(rows)} | {' | '.join(shares)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--only", choices=tuple(SETS))
    options = parser.parse_args()
    if options.report:
        report(options.folder)
    else:
        for name in [options.only] if options.only else SETS:
            watch_and_ask(options.folder / f"{name}.jsonl", name)
