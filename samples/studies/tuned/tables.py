"""Print the tables of README.md from the kept rows.

python tables.py search      # every setting that was tried, as the mean of its cells
python tables.py results     # each study: peers as published and tuned, and `durable`
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protokv.replay.metrics import AccuracyDifference, compare_paired
from protokv.replay.rows import AnswerRow, read_answer_rows

STUDIES: Final = Path(__file__).parents[1]
PEERS: Final = ("infinipot-v", "hermes", "rekv", "dycoke")
CONTENT: Final = frozenset({"colour", "shape", "where", "at", "whether"})
ORDER: Final = frozenset({"middle_first", "middle_last", "middle_before", "middle_after"})
TIME: Final = frozenset({"times", "where_first", "where_last"})
IGNORED: Final = frozenset({"kind", "budget", "positions", "recent_frames", "non_finite", "seed"})
"""Settings that no search varies, except ReKV's positions."""


@dataclass(frozen=True)
class Study:
    """A part of the table: the name of its files in tuned/, those of its own study, and which
    answers count.
    """

    title: str
    name: str
    reported: str
    delay_s: float
    types: frozenset[str]
    budgets: Sequence[int]


TABLE: Final = (
    Study("[delay](../delay/README.md), 400 s", "delay", "delay/high", 400, CONTENT, (151, 75, 38)),
    Study(
        "[look-alikes](../harder/README.md), 220 s",
        "harder",
        "harder/harder",
        220,
        CONTENT,
        (173, 43, 22, 11),
    ),
    Study("natural backdrops, 220 s", "natural", "harder/natural", 220, CONTENT, (173, 43, 22)),
    Study("order's worlds, content, 150 s", "order", "harder/order", 150, CONTENT, (130, 43, 22)),
    Study("order's worlds, order, 150 s", "order", "harder/order", 150, ORDER, (130, 43, 22)),
    Study(
        "[over time](../harder/README.md), 220 s",
        "time",
        "harder/time",
        220,
        TIME,
        (173, 43, 22, 11),
    ),
)


def name_setting(row: AnswerRow) -> str:
    """Return what a search varies, in words."""
    names = {"positions"} if row.config["kind"] == "rekv" else row.config.keys() - IGNORED
    return " ".join(
        f"{name}={float(row.config[name]):g}" for name in sorted(names) if name != "positions"
    ) or str(row.config["positions"])


def read_apart(paths: Iterable[Path]) -> list[AnswerRow]:
    """Read files one by one: rows of different versions differ in what they say about decoding."""
    return [row for path in paths if path.exists() for row in read_answer_rows([path])]


def print_search() -> None:
    """Print each setting: the share of right answers as a mean of the cells on 8 worlds, and on all
    16.
    """
    cells: dict[tuple[str, str], dict[tuple[str, int, float], list[tuple[bool, bool]]]] = {}
    for world in ("delay", "harder"):
        for row in read_apart(sorted((STUDIES / "tuned").glob(f"search-{world}-*.jsonl.gz"))):
            if row.type in CONTENT:
                found = cells.setdefault((row.config["kind"], name_setting(row)), defaultdict(list))
                is_first = int(row.video.removeprefix("world-")) % 1000 < 4
                found[world, row.budget, row.delay_s].append((is_first, row.correct))
    for (kind, setting), found in sorted(cells.items()):
        half = [[right for is_first, right in answers if is_first] for answers in found.values()]
        whole = [[right for _, right in answers] for answers in found.values()]
        means = [
            f"{sum(sum(one) / len(one) for one in part) / len(part):.3f}" for part in (half, whole)
        ]
        print(f"{kind:12} {setting:60}", *(means if half != whole else means[:1]))


def print_results() -> None:
    """Print a row for each study and budget."""
    for study in TABLE:
        names = (f"tuned/{study.name}", f"tuned/peers-{study.name}", study.reported)
        rows = read_apart(STUDIES / f"{name}.jsonl.gz" for name in names)
        rows = [row for row in rows if row.type in study.types and row.delay_s == study.delay_s]
        for budget in study.budgets:
            print(
                f"| {study.title} | {budget} |",
                " | ".join(describe([r for r in rows if r.budget == budget])),
                "|",
            )


def describe(rows: Sequence[AnswerRow]) -> list[str]:
    """Return the cells of one budget: each peer, `durable`, and the paired difference to the best
    tuned peer.

    A peer is the better, the less `durable` is above it on the worlds of both.
    """
    durable = [row for row in rows if row.memory == "durable"]
    cells = []
    differences = {}
    for peer in PEERS:
        published = [row for row in rows if row.memory == peer]
        tuned = [row for row in rows if row.memory.startswith(f"{peer} ")]
        cells.append(" / ".join(map(format_share, (published, tuned) if tuned else (published,))))
        found = compare_paired(durable, tuned)
        if found is not None:
            differences[peer] = found
    best = min(differences, key=lambda peer: differences[peer].share)
    return [
        *cells,
        format_share(durable),
        f"{format_difference(differences[best])}, {best}, n = {differences[best].n}",
    ]


def format_share(rows: Sequence[AnswerRow]) -> str:
    """Return the share of right answers; a dash if there are none."""
    return f"{sum(row.correct for row in rows) / len(rows):.2f}".replace("0.", ".") if rows else "-"


def format_difference(found: AccuracyDifference) -> str:
    """Return points with their interval."""
    low, share, high = (round(100 * value) for value in (found.low, found.share, found.high))
    return f"{share} ({low} to {high})"


if __name__ == "__main__":
    {"search": print_search, "results": print_results}[sys.argv[1]]()
