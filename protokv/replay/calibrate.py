"""Make calibrations of the answers of a replay, and show what they promise."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from protokv.errors import ConfigError
from protokv.replay.rows import AnswerRow
from protokv.stream.promise import (
    Calibration,
    ScoredAnswer,
    measure_kept_share,
    measure_novelty,
)
from protokv.texts import JsonObject

PROMISES = (0.01, 0.05, 0.1, 0.2)  # shares of wrong answers that a table shows


def calibrate_answers(rows: Iterable[AnswerRow]) -> list[Calibration]:
    """Return a calibration for each memory and budget.

    A question counts once, at one of its delays: answers to one question are not independent.
    ConfigError: rows of before do not say how sure an answer was.
    """
    groups = defaultdict[tuple[str, int], dict[tuple[str, str], AnswerRow]](dict)
    # the rows alone decide the order
    for row in sorted(rows, key=lambda row: hashlib.sha256(row.key.encode()).digest()):
        groups[row.memory, row.budget][row.video, row.question_id] = row
    return [_calibrate(list(groups[memory].values())) for memory in sorted(groups)]


def _calibrate(rows: Sequence[AnswerRow]) -> Calibration:
    """Return the calibration of one memory; the rows are in random order."""
    half = len(rows) // 2
    texts = tuple(dict.fromkeys(row.question for row in rows))
    shares = [measure_kept_share(row.budget, row.tokens_seen) for row in rows]
    return Calibration(
        model=rows[0].model,
        memory=rows[0].config,
        shares=(min(shares), max(shares)),
        videos=len({row.video for row in rows}),
        types=dict(Counter(row.type for row in rows)),
        questions=texts,
        novelty=measure_novelty(texts),
        chooses=_order(rows[:half]),
        tests=_order(rows[half:]),
    )


def _order(rows: Sequence[AnswerRow]) -> tuple[ScoredAnswer, ...]:
    found = []
    for row in rows:
        if row.mean_logprob is None:
            raise ConfigError(
                "these results do not say how sure the answers were",
                hint="ask again with --force, or name another file with -o",
            )
        found.append(ScoredAnswer(row.mean_logprob, not row.correct, row.is_unanswerable))
    return tuple(sorted(found, key=lambda one: -one.sure))


def tabulate_promises(calibrations: Sequence[Calibration]) -> Iterator[JsonObject]:
    """Yield what each calibration can promise, and what its test found: rows of memory, budget,
    answers tested, promise, and the shares that are answered and wrong; None: no such promise.

    `unanswerable` is the share of right answers to questions whose answer is that there is none,
    where a withheld one counts as right, as in the task HLD of OVO-Bench.
    """
    for one in calibrations:
        for promise in PROMISES:
            least = one.find_threshold(promise)
            given = [] if least is None else [a.wrong for a in one.tests if a.sure >= least]
            none = [
                a.sure < least or not a.wrong
                for a in one.tests
                if a.unanswerable and least is not None
            ]
            yield {
                "memory": one.memory["kind"],
                "budget": one.memory["budget"],
                "tested": len(one.tests),
                "at_most_wrong": promise,
                "answered": len(given) / len(one.tests) if given else None,
                "wrong": sum(given) / len(given) if given else None,
                "unanswerable": sum(none) / len(none) if none else None,
            }


def save_calibrations(path: Path, made: Sequence[Calibration]) -> None:
    """Write calibrations to a file, in a new folder if there is none. ConfigError: it cannot be
    written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(made))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
