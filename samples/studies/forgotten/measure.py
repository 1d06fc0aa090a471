"""Ask about what was shown and about what never was, and compare what is promised with what is
found.

    python measure.py FOLDER                # watch and ask; continues an interrupted run
    python measure.py --report FOLDER       # the tables of README.md

Questions about what a world shows are joined by questions of the same types about what it never
shows. Any answer to these is wrong, but for "zero" where a number is asked for. The first set of
each kind calibrates, and the others test. Worlds have 20 distracting events a minute, half of which
look like the evidence; where they count, shapes appear again and again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
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
from protokv.stream.promise import Calibration
from samples.seeds import STUDY
from samples.studies.evidence.measure import interval
from samples.studies.forgotten.facts import ask_facts
from samples.worlds.phrases import TEMPLATES
from samples.worlds.pictures import COLOUR_NAMES, NUMBERS, PLACES, SHAPES
from samples.worlds.streams import Worlds, WorldStream

MEMORIES: Final = ("durable", "infinipot-v", "sliding-window", "paper", "random")
WORLDS: Final = Worlds(length_s=240, distractor_rate=20.0, distractor_similarity=0.5)
LONGER: Final = msgspec.structs.replace(WORLDS, length_s=480)
ORDER: Final = msgspec.structs.replace(WORLDS, per_type=3)
COUNTING: Final = Worlds(length_s=240, distractor_rate=20.0, evidence="minutes", per_type=3)
MIDDLES: Final = ("middle_first", "middle_last", "middle_before", "middle_after")
NOTHING: Final = "unknown"
BUDGET: Final = 43  # 1/50 of four minutes


@dataclass(frozen=True, slots=True)
class Asked:
    """Worlds, and what is asked about them."""

    seeds: range
    worlds: Worlds = WORLDS
    budget: int = BUDGET
    model: str = "protokv/mini"
    memories: tuple[str, ...] = MEMORIES
    # asked alone, and as many of what never was; none: the usual ones, one of nothing for each type
    types: tuple[str, ...] = ()


COUNT: Final = Asked(range(0), COUNTING, BUDGET, "protokv/mini-order", ("durable",), ("times",))
MIDDLE: Final = replace(COUNT, worlds=ORDER, types=MIDDLES)
FACTS: Final = replace(COUNT, budget=208, model="smollm2", types=("fact",))  # 1/2 of a text
SETS: Final = {
    "calibrate": Asked(STUDY[12_000:12_024]),
    "same": Asked(STUDY[12_100:12_124]),
    "longer": Asked(STUDY[12_200:12_208], LONGER),
    "smaller": Asked(STUDY[12_300:12_308], budget=BUDGET // 4),
    "order-calibrate": replace(MIDDLE, seeds=STUDY[12_800:12_816]),
    "order": replace(MIDDLE, seeds=STUDY[12_900:12_912]),
    "counting-calibrate": replace(COUNT, seeds=STUDY[12_600:12_632]),
    "counting": replace(COUNT, seeds=STUDY[12_700:12_716]),
    "facts-calibrate": replace(FACTS, seeds=STUDY[13_000:13_008]),
    "facts": replace(FACTS, seeds=STUDY[13_100:13_106]),
}
"""Name -> what is asked. A set with `calibrate` in its name calibrates those behind it."""


def watch_and_ask(path: Path, name: str) -> None:
    """Append the rows of every world of a set that is missing in the file."""
    asked = SETS[name]
    rows = AnswerRowFile(path)
    done = {row.video for row in rows.rows.values()}
    variants = [
        MemoryVariant(one, MemoryConfig.of(one, budget=asked.budget)) for one in asked.memories
    ]
    if asked.model == FACTS.model:
        left = [seed for seed in asked.seeds if f"text-{seed}" not in done]
        for answer in ask_facts(left, variants):
            rows.append(answer)
        return
    backbone = load_backbone(asked.model, device="cpu")
    setup = TrialSetup.of(backbone)
    for stream in (WorldStream(seed, asked.worlds, asked.types) for seed in asked.seeds):
        if stream.name in done:
            continue
        kept = [one for one in stream.questions if one.type in (asked.types or {one.type})]
        stream.questions = kept
        number = len(kept) if asked.types else None
        stream.questions = [
            replace(one, reference_s=stream.length_s, reference="end")
            for one in (*kept, *find_questions_of_nothing(stream, number))
        ]
        plan = plan_asks(stream.questions, [0.0], stream.length_s)
        answers = setup.plan_answers(stream, plan, variants)
        for row in list(replay_stream(backbone, stream, answers, setup)):
            if isinstance(row, AnswerRow):
                rows.append(row)


def find_questions_of_nothing(stream: WorldStream, number: int | None) -> list[ReplayQuestion]:
    """Return questions about what never was: one for each type that is asked, or a number of them,
    the types in turn and in all wordings.
    """
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

    def draw(kinds: Iterator[str], wordings: int | None) -> Iterator[tuple[str, str]]:
        for kind in kinds:
            templates = TEMPLATES[kind][:wordings]
            template = templates[rng.integers(len(templates))] if wordings is None else templates[0]
            slots = {name for _, name, _, _ in Formatter().parse(template) if name}
            # "No" is right of what never was.
            if kind in ("whether", "middle_before", "middle_after"):
                continue
            if not slots or not all(free[name] for name in slots):
                continue
            drawn = {name: free[name][rng.integers(len(free[name]))] for name in sorted(slots)}
            yield kind, template.format(**drawn)

    kinds = [one.type for one in stream.questions]
    drawn = draw(iter(kinds), 1) if number is None else draw(cycle(dict.fromkeys(kinds)), None)
    found = dict[str, ReplayQuestion]()
    for kind, text in drawn:
        if len(found) == number:
            break
        expected = NUMBERS[0] if kind == "times" else NOTHING
        name = f"never-{len(found)}"
        found.setdefault(text, ReplayQuestion(name, text, expected, kind, 0.0, "end"))
    return list(found.values())


def report(folder: Path) -> None:
    """Print the tables."""
    print("| memory | promised | worlds | n | answered | wrong of these | of nothing: withheld |")
    print("|---|---|---|---|---|---|---|")
    made: dict[str, Calibration] = {}
    halves: dict[str, Calibration] = {}
    for name in SETS:
        rows = read_answer_rows([folder / f"{name}.jsonl.gz"])
        if SETS[name].types:
            print(f"| {name} {describe_scores(rows)}")
        if name.endswith("calibrate"):
            made = {one.memory["kind"]: one for one in calibrate_answers(rows)}
            halves = {one.memory["kind"]: one for one in calibrate_answers(halve(rows))}
            continue
        describe_all(made, name, rows)
        if name == "same":
            describe_all(halves, "half of nothing", halve(rows))
            for text in ("How many times did the star appear?", "Where did the star end up?"):
                print(f"\n{text} known: {made['durable'].knows(text)}")


def halve(rows: Sequence[AnswerRow]) -> list[AnswerRow]:
    """Return rows of which half are about what never was: others are left out, by their names."""
    asked = {(row.video, row.question_id): is_of_nothing(row) for row in rows}
    shown = [one for one, of_nothing in asked.items() if not of_nothing]
    random.Random(0).shuffle(shown)
    left_out = set(shown[len(asked) - len(shown) :])
    return [row for row in rows if (row.video, row.question_id) not in left_out]


def is_of_nothing(row: AnswerRow) -> bool:
    """Return whether a question is about what never was."""
    return row.question_id.startswith("never")


def describe_all(made: dict[str, Calibration], name: str, rows: Sequence[AnswerRow]) -> None:
    """Print what each memory promised, and what is found."""
    for memory, one in made.items():
        own = [row for row in rows if row.memory == memory]
        for promise in PROMISES:
            least = one.find_threshold(promise)
            if least is None:
                print(f"| {memory} | {promise:.0%} | {name}: cannot be promised | | | | |")
            else:
                print(describe(memory, promise, name, own, least))


def describe_scores(rows: Sequence[AnswerRow]) -> str:
    """Return how many rows there are, the share of right ones about what was shown, and how often a
    right answer scored above a wrong one.
    """
    shown = [row.correct for row in rows if not is_of_nothing(row)]
    sure = np.array([row.mean_logprob for row in rows])
    right = np.array([row.correct for row in rows])
    above = (sure[right][:, None] > sure[~right]).mean()
    return f"| {len(rows)} | {sum(shown) / len(shown):.2f} | {above:.2f} |"


def describe(
    memory: str, promise: float, name: str, rows: Sequence[AnswerRow], least: float
) -> str:
    """Return a row of the table."""
    given = [row for row in rows if (row.mean_logprob or 0.0) >= least]
    nothing = [row for row in rows if is_of_nothing(row)]
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
