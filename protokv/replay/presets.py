"""Sets of memories that reproduce the shape of one table or figure of the paper.

| preset | of the paper | rows |
|---|---|---|
| ablation | component ablations | near only, far only, without residuals, mass bias, continuity |
| anchors | rotary anchors | recent, first, average |
| allocation | variance-aware allocation | fixed, variance |
| splits | budget allocation | 1:5, 1:3, 1:2, 3:1 and S = 1, 2, 4, 8, 16 |
| coefficients | coefficient sweep | each constant halved and doubled |
| budgets | memory budgets | ours and the baselines at several budgets |
| quick | the delay sweep, small | what a first look needs |

All rows of the paper's tables are variations of its own configuration (`ProtoKVConfig.paper`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from protokv.config import CONFIGS, MemoryConfig, ProtoKVConfig
from protokv.config.protokv import PRESETS as CONFIG_PRESETS
from protokv.errors import ConfigError
from protokv.replay.runner import Variant

_CHANGES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "ablation": {
        "paper": {},
        "near only": {"split": (1, 0)},
        "far only": {"split": (0, 1)},
        "without residuals": {"residual": False},
        "without mass bias": {"mass_bias": "off"},
        "without continuity": {"spatial_weight": 0.0},
        "without idle decay": {"decay": "off"},
        "S = 1": {"pseudo_tokens": 1},
        "S = 1, without idle decay": {"pseudo_tokens": 1, "decay": "off"},
    },
    "anchors": {f"anchor {anchor}": {"anchor": anchor} for anchor in ("recent", "first", "average")},
    "allocation": {f"allocation {kind}": {"allocation": kind} for kind in ("fixed", "variance")},
    "splits": {
        **{f"split {near}:{far}": {"split": (near, far)} for near, far in ((1, 5), (1, 3), (1, 2), (3, 1))},
        **{f"S = {modes}": {"pseudo_tokens": modes} for modes in (1, 2, 4, 8, 16)},
    },
}
_SWEPT: Final = {
    "alpha, beta": ("key_rate", "value_rate"),
    "lambda_sp": ("spatial_weight",),
    "lambda_idle": ("idle_weight",),
    "gamma": ("decay_rate",),
    "T_idle": ("idle_steps",),
}
_BASELINES: Final = ("durable", "continuity", "paper", "sliding-window", "infinipot-v")

PRESETS: Final = (*_CHANGES, "coefficients", "budgets", "quick")


def preset(name: str, budgets: Sequence[int]) -> list[Variant]:
    """The memories of a preset at each budget.

    Raises:
        ConfigError: there is no such preset, or a memory of it does not fit a budget.
    """
    if name in _CHANGES:
        changes = _CHANGES[name]
        return [
            Variant(row, ProtoKVConfig.paper(b).with_fields(fields)) for b in budgets for row, fields in changes.items()
        ]
    if name == "coefficients":
        return [variant for budget in budgets for variant in _coefficients(budget)]
    if name == "budgets":
        return [
            memory(row, tokens) for budget in budgets for tokens in _around(budget) for row in ("full", *_BASELINES)
        ]
    if name == "quick":
        return [memory(row, budget) for budget in budgets for row in ("full", *_BASELINES)]
    raise ConfigError(f"there is no preset {name!r}", hint=f"use one of {', '.join(PRESETS)}")


def variants(name: str | None, memories: Sequence[str] | None, budgets: Sequence[int]) -> list[Variant]:
    """The memories of a preset, or those that are named, at each budget; "quick" where neither is given.

    Raises:
        ConfigError: both are given, there is no budget, or something is unknown.
    """
    if name is not None and memories is not None:
        raise ConfigError("a replay has either --memory or --preset", hint="leave one of them out")
    if not budgets:
        raise ConfigError("there is no budget", hint="for example --budget 512,6k")
    if memories is None:
        return preset(name or "quick", budgets)
    return [memory(each, budget) for budget in budgets for each in memories]


def memory(name: str, budget: int) -> Variant:
    """A memory by its kind, or by the name of a preset of ProtoKV.

    Raises:
        ConfigError: it is neither.
    """
    if name in CONFIG_PRESETS:
        return Variant(name, ProtoKVConfig.preset(name, budget))
    if name == ProtoKVConfig.kind:
        return Variant("durable", ProtoKVConfig.durable(budget))
    if name not in CONFIGS:
        known = ", ".join((*CONFIG_PRESETS, *CONFIGS))
        raise ConfigError(f"there is no memory {name!r}", hint=f"use some of {known}")
    return Variant(name, MemoryConfig.of(name, budget=budget))


def _coefficients(budget: int) -> list[Variant]:
    base = ProtoKVConfig.paper(budget)
    found = [Variant("paper", base)]
    for row, names in _SWEPT.items():
        for factor in (0.5, 2.0):
            values = {name: type(getattr(base, name))(getattr(base, name) * factor) for name in names}
            found.append(Variant(f"{row} x{factor:g}", replace(base, **values)))
    return found


def _around(budget: int) -> tuple[int, ...]:
    """A quarter, a half, the whole and the double of a budget."""
    return tuple(max(1, budget * share // 4) for share in (1, 2, 4, 8))
