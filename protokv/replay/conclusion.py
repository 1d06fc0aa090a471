"""The conclusion of a replay: which memory has the most right answers at the longest delay, and whether that is clear.

A difference is clear if the paired 95% interval of it, on the same questions, does not contain 0. The intervals are
not corrected for the number of comparisons. The full cache keeps every token, so it is told beside the memories and
never wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from protokv.memories import DEFAULT, FullConfig
from protokv.replay.metrics import compare
from protokv.replay.rows import Row
from protokv.replay.tables import format_delay, list_names
from protokv.texts import count_text

Curves = Sequence[Mapping[str, Any]]
_FULL: Final = FullConfig.name


def conclude(rows: Sequence[Row], curves: Curves) -> dict[str, Any]:
    """Return the conclusion as plain JSON: a `text`, `details` (sentences on each budget, and a caution), and numbers.

    `budgets` has for each budget, largest first, the delay, the memory with the most right answers there, its accuracy,
    and its `differences` to each other memory of that budget and to the full cache.

    Args:
        rows: all answers.
        curves: of the report; `all` of each has the accuracies.
    """
    cells: dict[tuple[str, int, float], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.memory, row.budget, row.delay_s), []).append(row)
    budgets = sorted({curve["budget"] for curve in curves if curve["memory"] != _FULL}, reverse=True)
    found = [_find_best(cells, curves, budget) for budget in budgets]
    known = [one for one in found if one is not None]
    details = [_describe(one) for one in known]
    text, rest = (details[0], []) if len(known) == 1 else (_sum_up(known), details)
    if any(one["thin"] for one in known):
        questions = count_text(min(one["n"] for one in known), "question")
        videos = count_text(min(one["videos"] for one in known), "video")
        rest.append(f"This is {questions} about {videos}: too few to be sure, other videos may differ.")
    return {"text": text, "details": rest, "budgets": known}


def _find_best(
    cells: Mapping[tuple[str, int, float], Sequence[Row]], curves: Curves, budget: int
) -> dict[str, Any] | None:
    """Return the numbers of one budget; None if no delay is common to its memories."""
    own = [curve for curve in curves if curve["budget"] == budget and curve["memory"] != _FULL]
    common = set.intersection(*({point["delay_s"] for point in curve["all"]} for curve in own))
    if not common:
        return None
    delay = max(common)
    points = {curve["memory"]: next(p for p in curve["all"] if p["delay_s"] == delay) for curve in own}
    best = max(points, key=lambda name: (points[name]["accuracy"], name == DEFAULT))
    full = [curve["budget"] for curve in curves if curve["memory"] == _FULL]
    others = [(name, budget) for name in points if name != best]
    others += [(_FULL, budget if budget in full else size) for size in full[:1]]
    differences = []
    for name, size in others:
        theirs = cells.get((name, size, delay), ())
        found = compare(cells[best, budget, delay], theirs)
        if found is not None:
            accuracy = sum(row.correct for row in theirs) / len(theirs)
            differences.append({"memory": name, "budget": size, "accuracy": round(accuracy, 4)} | found.to_dict())
    own_numbers: dict[str, Any] = {"budget": budget, "delay_s": delay, "memory": best, **points[best]}
    return own_numbers | {"differences": differences}


def _describe(found: Mapping[str, Any]) -> str:
    """Return one budget in words."""
    others = sorted((d for d in found["differences"] if d["memory"] != _FULL), key=lambda d: -d["accuracy"])
    unclear, worse = [d for d in others if d["low"] <= 0], [d for d in others if d["low"] > 0]
    start = f"{_after(found)}, with {_tokens(found)}, "
    share = f"{found['accuracy']:.0%} right (95% interval {_percent(found['low'])} to {_percent(found['high'])})"
    if not others:
        text = f"{start}{_quote(found['memory'])} has {share}; no other memory was measured at this budget"
    elif not unclear:
        next_best = worse[0]
        text = (
            f"{start}{_quote(found['memory'])} answers best: {share}, which is {_points(next_best)} more than "
            f"{_quote(next_best['memory'])}" + (f" and clearly more than {_shares(worse[1:])}" if worse[1:] else "")
        )
    else:
        text = (
            f"{start}no memory is clearly the best: {_quote(found['memory'])} has {share}, and the "
            f"{'difference' if len(unclear) == 1 else 'differences'} to {_shares(unclear)} may be chance"
            + (f"; clearly worse: {_shares(worse)}" if worse else "")
        )
    for full in (d for d in found["differences"] if d["memory"] == _FULL):
        clear = "clearly less" if full["low"] > 0 else "clearly more" if full["high"] < 0 else "no clear difference"
        text += f". The full cache, which keeps every token, has {full['accuracy']:.0%}: {clear}"
    return text + "."


def _sum_up(found: Sequence[Mapping[str, Any]]) -> str:
    """Return several budgets in one sentence."""
    if not found:
        return "There is no delay at which two memories of one budget can be compared."
    compared = [one for one in found if any(d["memory"] != _FULL for d in one["differences"])]
    if not compared:
        named = [f"{_quote(one['memory'])} {one['accuracy']:.0%} right with {_tokens(one)}" for one in found]
        return f"No two memories were measured at one budget. {_after(found[0])}: {list_names(named)}."
    found = compared
    start = _after(found[0]) if len({one["delay_s"] for one in found}) == 1 else "At the longest delay of each budget"
    if len({one["memory"] for one in found}) == 1 and all(len(_leaders(one)) == 1 for one in found):
        name = found[0]["memory"]
        return f"{start}, {_quote(name)} clearly answers best at every budget: {_told(found, name)}."
    always = [name for name in _leaders(found[0]) if all(name in _leaders(one) for one in found)]
    if not always:
        named = [f"{_quote(one['memory'])} with {_tokens(one)} ({one['accuracy']:.0%})" for one in found]
        return f"{start}, the memory with the most right answers depends on the budget: {list_names(named)}."
    name = DEFAULT if DEFAULT in always else always[0]
    rest = [other for other in always if other != name]
    text = (
        f"{start}, {_quote(name)} is at every budget the best memory or not clearly worse than it: {_told(found, name)}"
    )
    if not rest:
        return text + "; no other memory is."
    return text + f"; so {'is' if len(rest) == 1 else 'are'} {list_names([*map(_quote, rest)])}."


def _leaders(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the best memory of a budget, and those whose difference to it may be chance, with their accuracies."""
    others = [d for d in found["differences"] if d["memory"] != _FULL and d["low"] <= 0]
    return {found["memory"]: found["accuracy"]} | {d["memory"]: d["accuracy"] for d in others}


def _told(found: Sequence[Mapping[str, Any]], name: str) -> str:
    return list_names([f"{_leaders(one)[name]:.0%} right with {_tokens(one)}" for one in found])


def _quote(name: str) -> str:
    """Return the name of a memory; that of a variant, which has several words, in quotes."""
    return f'"{name}"' if " " in name else name


def _after(found: Mapping[str, Any]) -> str:
    return f"After {format_delay(found['delay_s'])}" if found["delay_s"] else "Without delay"


def _tokens(found: Mapping[str, Any]) -> str:
    return f"{found['budget']:,} tokens"


def _points(found: Mapping[str, Any]) -> str:
    return f"{100 * found['difference']:.0f} points ({100 * found['low']:.0f} to {100 * found['high']:.0f})"


def _shares(found: Sequence[Mapping[str, Any]]) -> str:
    return list_names([f"{_quote(one['memory'])} ({one['accuracy']:.0%})" for one in found])


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
