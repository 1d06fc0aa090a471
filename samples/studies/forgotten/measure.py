"""Ask about what was shown and about what never was, and compare what is promised with what is
found.

    python measure.py FOLDER                # watch and ask; continues an interrupted run
    python measure.py --report FOLDER       # the tables of README.md

Questions about what a world shows are joined by questions of the same types about what it never
shows. Any answer to these is wrong, but for "zero" where a number is asked for. A set of each kind
calibrates; where it promises anything, others test. Worlds have 20 distracting events a minute,
half of which look like the evidence; where they count, shapes appear again and again.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from samples.worlds.questions import Fact, phrase
from samples.worlds.streams import Worlds, WorldStream

BUDGET: Final = 43  # 1/50 of four minutes
MINI: Final = {
    "durable": BUDGET,
    "infinipot-v": 44,
    "sliding-window": 50,
    "paper": 43,
    "random": 44,
}
"""Memory -> tokens, at the bytes of `durable` within 1 %; `paper` holds 1.54 times these bytes."""
TUNED: Final = {
    "infinipot-v": {"redundancy_share": 1.0, "kept_share": 0.95, "recent_share": 0.125},
}
"""Settings of `samples/studies/tuned`."""
WORLDS: Final = Worlds(length_s=240, distractor_rate=20.0, distractor_similarity=0.5)
LONGER: Final = msgspec.structs.replace(WORLDS, length_s=480)
ORDER: Final = msgspec.structs.replace(WORLDS, per_type=3)
COUNTING: Final = Worlds(length_s=240, distractor_rate=20.0, evidence="minutes", per_type=3)
MIDDLES: Final = ("middle_first", "middle_last", "middle_before", "middle_after")
NOTHING: Final = "unknown"
PREMISE: Final = "premise"
YES: Final = "yes"


@dataclass(frozen=True, slots=True)
class Asked:
    """Worlds, and what is asked about them: half of it about what never was."""

    seeds: range
    worlds: Worlds = WORLDS
    budgets: Mapping[str, int] = field(default_factory=lambda: MINI)
    model: str = "protokv/mini"
    types: tuple[str, ...] = ()  # asked alone; none: the usual ones
    premises: bool = True  # it is also asked of each shape whether it was shown


ALONE: Final = {"durable": BUDGET}
PEERS: Final = {name: tokens for name, tokens in MINI.items() if name not in ALONE}
ORDERED: Final = Asked(range(0), ORDER, ALONE, "protokv/mini-order", MIDDLES)
COUNTED: Final = replace(ORDERED, worlds=COUNTING, types=("times",))
FACTS: Final = replace(ORDERED, budgets={"durable": 208}, model="smollm2", types=("fact",))
# at the bytes of half of a text in `durable`; `paper` holds 3.1 times as much
OF_FACTS: Final = {"infinipot-v": 228, "sliding-window": 238, "random": 228, "paper": 208}
CONTENT: Final = Asked(range(0), budgets=ALONE)
SEEN: Final = replace(
    CONTENT,
    model="sight/model",
    types=("colour", "shape", "where", "at", "whether"),
    premises=False,
)
"""A real language model that was made to see (`samples/studies/sight`), in the working folder."""
# at the bytes of `durable` in this model; `paper` holds 1.46 times as much
SEEN_PEERS: Final = {"infinipot-v": 46, "sliding-window": 48, "random": 46, "paper": 43}
SETS: Final = {
    "calibrate": replace(CONTENT, seeds=STUDY[15_000:15_028]),
    "same": replace(CONTENT, seeds=STUDY[15_100:15_128]),
    "longer": replace(CONTENT, seeds=STUDY[15_200:15_208], worlds=LONGER),
    "smaller": replace(CONTENT, seeds=STUDY[15_300:15_310], budgets={"durable": BUDGET // 4}),
    "peers-calibrate": Asked(STUDY[15_000:15_028], budgets=PEERS, premises=False),
    "order-calibrate": replace(ORDERED, seeds=STUDY[15_400:15_410]),
    "order": replace(ORDERED, seeds=STUDY[15_500:15_508]),
    "order-peers-calibrate": replace(ORDERED, seeds=STUDY[15_400:15_410], budgets=PEERS),
    "counting-calibrate": replace(COUNTED, seeds=STUDY[15_600:15_644]),
    "counting-peers-calibrate": replace(COUNTED, seeds=STUDY[15_600:15_620], budgets=PEERS),
    "sight-calibrate": replace(SEEN, seeds=STUDY[15_700:15_728]),
    "sight": replace(SEEN, seeds=STUDY[15_800:15_828]),
    "sight-peers-calibrate": replace(SEEN, seeds=STUDY[15_700:15_714], budgets=SEEN_PEERS),
    "facts-calibrate": replace(FACTS, seeds=STUDY[13_000:13_008]),
    "facts-peers-calibrate": replace(FACTS, seeds=STUDY[13_000:13_004], budgets=OF_FACTS),
}
"""Name -> what is asked. A set with `calibrate` in its name calibrates those behind it."""


def watch_and_ask(path: Path, name: str) -> None:
    """Append the rows of every world of a set that is missing in the file."""
    asked = SETS[name]
    rows = AnswerRowFile(path)
    done = {row.video for row in rows.rows.values()}
    variants = [
        MemoryVariant(one, MemoryConfig.of(one, budget=tokens, **TUNED.get(one, {})))
        for one, tokens in asked.budgets.items()
    ]
    if asked.model == FACTS.model:
        left = [seed for seed in asked.seeds if f"text-{seed}" not in done]
        for answer in ask_facts(left, variants):
            rows.append(answer)
        return
    setup = TrialSetup.of(load_backbone(asked.model, device="cpu"))
    for stream in (WorldStream(seed, asked.worlds, asked.types) for seed in asked.seeds):
        if stream.name in done:
            continue
        kept = [one for one in stream.questions if one.type in (asked.types or {one.type})]
        stream.questions = [
            replace(one, reference_s=stream.length_s, reference="end")
            for one in (
                *kept,
                *find_questions_of_nothing(stream, kept),
                *ask_premises(stream, asked),
            )
        ]
        asks = plan_asks(stream.questions, [0.0], stream.length_s, Counter())
        answers = setup.plan_answers(stream, asks, variants)
        for row in list(replay_stream(stream, answers, setup)):
            if isinstance(row, AnswerRow):
                rows.append(row)


def ask_premises(stream: WorldStream, asked: Asked) -> list[ReplayQuestion]:
    """Return a question for each shape that only asks whether it was shown, if that is asked."""
    template = TEMPLATES["whether"][0]
    seen = {event.shape for event in stream.world.events()}
    return [
        ReplayQuestion(
            f"{PREMISE}-{name}",
            template.format(shape=name),
            YES if number in seen else "no",
            "whether",
            0.0,
            "end",
        )
        for number, name in enumerate(SHAPES if asked.premises else ())
    ]


def find_questions_of_nothing(
    stream: WorldStream, shown: Sequence[ReplayQuestion]
) -> list[ReplayQuestion]:
    """Return as many questions about what never was as are asked about what was shown, in the same
    wordings, the types in turn.
    """
    events = list(stream.world.events())
    colours = {event.colour for event in events}
    rng = np.random.default_rng([stream.world.config.seed, 77])
    seen = sorted({event.shape for event in events})
    free = {
        "shape": [one for n, one in enumerate(SHAPES) if n not in seen],
        "place": [one for n, one in enumerate(PLACES) if n not in {e.place for e in events}],
        "colour": [one for n, one in enumerate(COLOUR_NAMES) if n not in colours],
        "other": [SHAPES[n] for n in seen],
    }
    kinds = list[tuple[str, list[str]]]()
    for kind in dict.fromkeys(one.type for one in shown):
        slots = {name for _, name, _, _ in Formatter().parse(TEMPLATES[kind][0]) if name}
        # "No" is right of what never was.
        if kind in ("whether", "middle_before", "middle_after") or not slots:
            continue
        if all(free[name] for name in slots):
            kinds.append((kind, sorted(slots)))
    found = dict[str, ReplayQuestion]()
    for kind, names in cycle(kinds):
        if len(found) == len(shown):
            break
        drawn = {name: free[name][rng.integers(len(free[name]))] for name in names}
        text = phrase(rng, kind, Fact("", (), 0.0, drawn))
        expected = NUMBERS[0] if kind == "times" else NOTHING
        name = f"never-{len(found)}"
        found.setdefault(text, ReplayQuestion(name, text, expected, kind, 0.0, "end"))
    return list(found.values())


def report(folder: Path) -> None:
    """Print the tables."""
    made: dict[tuple[str, str], Calibration] = {}
    for name, asked in SETS.items():
        rows = read_answer_rows([folder / f"{name}.jsonl.gz"])
        plain = [row for row in rows if not is_premise(row)]
        ways = {"": plain}
        if len(plain) < len(rows):
            ways[", premise"] = doubt_premises(plain, rows)
        for memory in asked.budgets:
            cells = []
            for way, answers in ways.items():
                own = [row for row in answers if row.memory == memory]
                if name.endswith("calibrate"):
                    (made[way, memory],) = calibrate_answers(own)
                    cells.append(describe_scores(own, made[way, memory]))
                    continue
                for promise in PROMISES:
                    least = made[way, memory].find_threshold(promise)
                    if least is not None:
                        print(f"| {promise:.0%} | {name}{way} | {describe(own, least)} |")
            if cells:
                shown = [row.correct for row in own if not is_of_nothing(row)]
                start = f"| {name} | {memory} | {len(own)} | {sum(shown) / len(shown):.2f}"
                print(f"{start} | {' | '.join(cells)} |")
        if name == "calibrate":
            content = made["", "durable"]
        known = [content.knows(row.question) for row in plain]
        print(f"{name}: {sum(known)} of {len(known)} known by their words")


def is_of_nothing(row: AnswerRow) -> bool:
    """Return whether a question is about what never was."""
    return row.question_id.startswith("never")


def is_premise(row: AnswerRow) -> bool:
    """Return whether a question only asks whether a shape was shown."""
    return row.question_id.startswith(PREMISE)


def doubt_premises(rows: Sequence[AnswerRow], asked: Sequence[AnswerRow]) -> list[AnswerRow]:
    """Return rows that are as sure as the answer is, or as the model is that the shapes that the
    question names were shown, whichever is less.
    """
    shown = {(row.video, row.memory, row.question_id): measure_yes(row) for row in asked}
    found = []
    for row in rows:
        names = {one for one in re.findall(r"\w+", row.question) if one in SHAPES}
        sure = [shown[row.video, row.memory, f"{PREMISE}-{one}"] for one in names]
        found.append(replace(row, mean_logprob=min([row.mean_logprob or 0.0, *sure])))
    return found


def measure_yes(row: AnswerRow) -> float:
    """Return the log probability of "yes", if an answer is "yes" or "no"."""
    sure = row.mean_logprob or 0.0
    return sure if row.prediction == YES else math.log(max(1e-9, 1 - math.exp(sure)))


def describe_scores(rows: Sequence[AnswerRow], made: Calibration) -> str:
    """Return how often a right answer scored above a wrong one, and what can be promised."""
    sure = np.array([row.mean_logprob for row in rows])
    right = np.array([row.correct for row in rows])
    can = [f"{one:.0%}" for one in PROMISES if made.find_threshold(one) is not None]
    above = f"{(sure[right][:, None] > sure[~right]).mean():.2f}" if right.any() else "-"
    return f"{above} | {', '.join(can) or '-'}"


def describe(rows: Sequence[AnswerRow], least: float) -> str:
    """Return the columns of what is found: how many are asked, and the shares that are answered,
    wrong of these, and withheld of what never was.
    """
    sure = [(row.mean_logprob or 0.0) >= least for row in rows]
    given = [row for row, one in zip(rows, sure, strict=True) if one]
    nothing = [not one for row, one in zip(rows, sure, strict=True) if is_of_nothing(row)]
    shares = [sure, [not row.correct for row in given], nothing]
    return " | ".join([str(len(rows)), *map(interval, shares)])


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
