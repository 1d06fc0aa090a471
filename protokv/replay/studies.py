"""Named studies: which memories to compare, and on which procedural streams where the caller names no others.

| study | memories | of the paper |
|---|---|---|
| quick | the full cache, ours and the baselines | the delay sweep, small: a first look in a minute |
| delay | the same and more, at three budgets, on 16 streams of 11 minutes | the delay sweep |
| harder | the same, each down to where it breaks, among look-alikes; 32 streams of 8 minutes | - |
| order | the same where neither of two events opens or closes the stream; 32 streams of 6 minutes | - |
| time | the same on what lasts for minutes: counting over time, and slow change; 24 streams of 8 minutes | - |
| hour | three at compact positions, to an hour behind the evidence; 4 streams | - |
| decay | the paper's configuration at 1/2 and 1/10 of the tokens, by readings of its idle rule | - |
| modes | `durable` with residual statistics, S = 1, 2, 4, and with centres of 8 bits | - |
| budgets | those of quick at a quarter, half, once and twice the budget | memory budgets |
| ablation | near only, far only, without residuals, mass bias, continuity, decay | component ablations |
| anchors | recent, first, average | rotary anchors |
| allocation | fixed, variance | variance-aware allocation |
| splits | 1:5, 1:3, 1:2, 3:1 and S = 1, 2, 4, 8, 16 | budget allocation |
| coefficients | each constant halved and doubled | coefficient sweep |

The evidence of the streams lies in a mixture of places (`protokv.replay.streams`), that of the ablation after two
minutes, when the codebooks of the residuals are fitted. That of `time` lasts for minutes: shapes that appear one to
four times, and one that slowly crosses the picture, since the embedded models see shapes and places and know no
amounts. The rows of the paper's tables are variations of its own configuration (`PaperConfig`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from protokv.config import DEFAULT, DurableConfig, FullConfig, MemoryConfig, PaperConfig
from protokv.errors import ConfigError
from protokv.mini import EMBEDDED, EMBEDDED_ORDER, is_embedded
from protokv.mini.phrases import TIME_TYPES
from protokv.mini.seeds import DEMONSTRATION, STUDY
from protokv.replay.questions import WORLD
from protokv.replay.runner import Variant
from protokv.replay.streams import Before, Distractors, Evidence

_CALM: Final = Distractors()
_ALIKE: Final = Distractors(events_per_minute=20.0, distractor_similarity=0.5)
# The smaller embedded model reads the order of two events among many too badly to tell memories apart by it.
_CONTENT: Final = tuple(kind.name for kind in WORLD if kind.group == "content")
_ORDER: Final = ("middle_first", "middle_last", "middle_before", "middle_after")
_DECAYS: Final = (
    "paper",
    "without idle decay",
    "decay once per idle interval",
    "T_idle of 240 s at a step a second",
)


@dataclass(frozen=True, slots=True)
class Study:
    """Memories to compare, and what they are compared on unless the caller says otherwise.

    Attributes:
        memories: the variants at one budget.
        budgets: visual tokens kept.
        seeds, length_s, distractors, per_type, before, evidence: of the procedural streams; see `WorldStream`.
        delays_s: after the evidence.
        types: of questions; None: those of which the answer lasts.
        model: that reads what is asked.
    """

    memories: Callable[[int], list[Variant]]
    budgets: tuple[int, ...] = (72,)
    seeds: range = DEMONSTRATION[1:5]
    length_s: int = 300
    distractors: Distractors = _CALM
    per_type: int = 2
    before: Before = "mix"
    evidence: Evidence = "moments"
    delays_s: tuple[float, ...] = (0, 30, 120, 160)
    types: tuple[str, ...] | None = None
    model: str = EMBEDDED

    def variants(self, budgets: Sequence[int] | None = None) -> list[Variant]:
        """The memories at each budget; see `drop_repeated`.

        Raises:
            ConfigError: a memory does not fit a budget.
        """
        return drop_repeated([variant for budget in budgets or self.budgets for variant in self.memories(budget)])


def default_budgets(study: Study, model: str) -> list[int]:
    """The budgets of a study with an embedded model, whose steps have nine tokens; the usual one with any other."""
    return list(study.budgets) if is_embedded(model) else [MemoryConfig.of(DEFAULT).budget]


def drop_repeated(variants: Sequence[Variant]) -> list[Variant]:
    """Each memory once per budget, and the full cache, which has none, at the first only."""
    found: dict[tuple[str, int], Variant] = {}
    for variant in variants:
        size = 0 if variant.config.name == FullConfig.name else variant.budget
        found.setdefault((variant.label, size), variant)
    return list(found.values())


def name_memories(names: Sequence[str], budgets: Sequence[int]) -> list[Variant]:
    """Memories by their names, at each budget; see `drop_repeated`.

    Raises:
        ConfigError: a name is unknown.
    """
    return drop_repeated([name_memory(name, budget) for budget in budgets for name in names])


@dataclass(frozen=True, slots=True)
class Variation:
    """A setting and the values to compare.

    Attributes:
        memory: whose setting it is; None: that of every memory.
        setting: the name of the field.
        values: each as it is written in tables, with the value itself.
    """

    memory: str | None
    setting: str
    values: Sequence[tuple[str, Any]]


def vary_memories(variants: Sequence[Variant], variations: Sequence[Variation]) -> list[Variant]:
    """Replace each memory by one variant per combination of values.

    Raises:
        ConfigError: a variation names a memory that is not there, or a setting or value that the memory does not have.
    """
    found = list(variants)
    for variation in variations:
        names = {variant.config.name for variant in found}
        if variation.memory is not None and variation.memory not in names:
            raise ConfigError(
                f"{variation.memory}.{variation.setting} is set, and {variation.memory} is not compared",
                hint=f"memories: {', '.join(sorted(names))}",
            )
        found = [
            changed
            for variant in found
            for changed in (
                [variant]
                if variation.memory not in (None, variant.config.name)
                else [
                    Variant(
                        f"{variant.label} {variation.setting}={text}",
                        variant.config.with_fields({variation.setting: value}),
                    )
                    for text, value in variation.values
                ]
            )
        ]
    return found


def name_memory(name: str, budget: int) -> Variant:
    """A memory by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    return Variant(name, MemoryConfig.of(name, budget=budget))


def find_study(name: str) -> Study:
    """A study by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in STUDIES:
        raise ConfigError(f"there is no study {name!r}", hint=f"use one of {', '.join(STUDIES)}")
    return STUDIES[name]


_BASELINES: Final = ("durable", "continuity", "paper", "sliding-window", "infinipot-v")
_ABLATION: Final[dict[str, dict[str, Any]]] = {
    "paper": {},
    "near only": {"split": (1, 0)},
    "far only": {"split": (0, 1)},
    "without residuals": {"residual": False},
    "without mass bias": {"mass_bias": "off"},
    "without continuity": {"spatial_weight": 0.0},
    "without idle decay": {"decay": "off"},
    "decay once per idle interval": {"decay": "interval"},
    "T_idle of 240 s at a step a second": {"idle_steps": 240},
    "S = 1": {"pseudo_tokens": 1},
    "S = 1, without idle decay": {"pseudo_tokens": 1, "decay": "off"},
}
_ANCHORS: Final[dict[str, dict[str, Any]]] = {
    f"anchor {anchor}": {"anchor": anchor} for anchor in ("recent", "first", "average")
}
_ALLOCATION: Final[dict[str, dict[str, Any]]] = {
    f"allocation {kind}": {"allocation": kind} for kind in ("fixed", "variance")
}
_SPLITS: Final[dict[str, dict[str, Any]]] = {
    **{f"split {near}:{far}": {"split": (near, far)} for near, far in ((1, 5), (1, 3), (1, 2), (3, 1))},
    **{f"S = {modes}": {"pseudo_tokens": modes} for modes in (1, 2, 4, 8, 16)},
}
_SWEPT: Final = {
    "alpha, beta": ("key_rate", "value_rate"),
    "lambda_sp": ("spatial_weight",),
    "lambda_idle": ("idle_weight",),
    "gamma": ("decay_rate",),
    "T_idle": ("idle_steps",),
}


def _vary_paper(changes: dict[str, dict[str, Any]]) -> Callable[[int], list[Variant]]:
    """The paper's configuration with the fields of each row changed."""
    return lambda budget: [
        Variant(row, PaperConfig(budget=budget).with_fields(fields)) for row, fields in changes.items()
    ]


def _compare(budget: int) -> list[Variant]:
    return name_memories(("full", *_BASELINES), [budget])


def _compare_more(budget: int) -> list[Variant]:
    return name_memories(("full", "last-frames", *_BASELINES, "rekv", "dycoke"), [budget])


# The least budget at which each is run among look-alikes: below it is known to have lost the evidence.
_LEAST: Final = {
    "full": 100,
    "durable": 1,
    "infinipot-v": 10,
    "sliding-window": 40,
    "rekv": 40,
    "last-frames": 100,
    "continuity": 20,
    "paper": 40,
}


def _compare_until_broken(budget: int) -> list[Variant]:
    return name_memories([name for name, least in _LEAST.items() if budget >= least], [budget])


def _compare_compact(budget: int) -> list[Variant]:
    found = name_memories(("durable", "infinipot-v", "sliding-window"), [budget])
    return [Variant(one.label, one.config.with_fields({"positions": "compact"})) for one in found]


# What a prototype may keep besides its centre, and in fewer bytes: each row with the budgets that it is run at. From 43
# to 5 tokens, 1/100 to 1/1,000, they are compared at equal tokens; at the others one has about the bytes of another.
_OF_MODES: Final[dict[str, tuple[dict[str, Any], tuple[int, ...]]]] = {
    "durable": ({}, (43, 22, 11, 5, 134, 68, 33, 13)),
    "32 bits": ({"center_bits": 32}, (43, 22, 11, 5, 61, 40, 30, 24, 13)),
    "S = 1, residuals": ({"residual": True}, (22, 11)),
    "S = 2": ({"pseudo_tokens": 2, "residual": True}, (22,)),
    "S = 2, variance": ({"pseudo_tokens": 2, "residual": True, "allocation": "variance"}, (22, 11, 5)),
    "S = 4, variance": ({"pseudo_tokens": 4, "residual": True, "allocation": "variance"}, (22, 11)),
}


def _compare_modes(budget: int) -> list[Variant]:
    """`durable`, with centres of 32 bits, and with residual statistics: at equal tokens as many centres with S = 1, and
    a half or a quarter else. A budget that is none of the study has every row."""
    own = any(budget in budgets for _, budgets in _OF_MODES.values())
    rows = {row: fields for row, (fields, budgets) in _OF_MODES.items() if not own or budget in budgets}
    return [Variant(row, DurableConfig(budget=budget).with_fields(fields)) for row, fields in rows.items()]


def _compare_around(budget: int) -> list[Variant]:
    """At a quarter, a half, the whole and the double of a budget."""
    return [variant for share in (1, 2, 4, 8) for variant in _compare(max(1, budget * share // 4))]


def _sweep_coefficients(budget: int) -> list[Variant]:
    base = PaperConfig(budget=budget)
    found = [Variant("paper", base)]
    for row, names in _SWEPT.items():
        for factor in (0.5, 2.0):
            values = {name: type(getattr(base, name))(getattr(base, name) * factor) for name in names}
            found.append(Variant(f"{row} x{factor:g}", replace(base, **values)))
    return found


STUDIES: Final[dict[str, Study]] = {
    "quick": Study(_compare),
    "delay": Study(
        _compare_more,
        budgets=(238, 119, 59),
        seeds=STUDY[:16],
        length_s=660,
        distractors=Distractors(events_per_minute=20.0),
        per_type=3,
        delays_s=(0, 30, 120, 300, 340),
    ),
    "harder": Study(
        _compare_until_broken,
        # 1/25, 1/100, 1/200, 1/400 and 1/1,000 of 4,320 tokens.
        budgets=(173, 43, 22, 11, 4),
        seeds=STUDY[2000:2032],
        length_s=480,
        distractors=_ALIKE,
        per_type=3,
        delays_s=(0, 60, 220),
        types=_CONTENT,
    ),
    "order": Study(
        _compare_until_broken,
        # 1/25, 1/75 and 1/150 of 3,240 tokens.
        budgets=(130, 43, 22),
        seeds=STUDY[2400:2432],
        length_s=360,
        distractors=Distractors(events_per_minute=5.0),
        delays_s=(0, 60, 150),
        types=(*_ORDER, "colour", "where"),
        model=EMBEDDED_ORDER,
    ),
    "time": Study(
        _compare_until_broken,
        # 1/25, 1/100, 1/200 and 1/400 of 4,320 tokens.
        budgets=(173, 43, 22, 11),
        seeds=STUDY[2724:2748],
        length_s=480,
        distractors=Distractors(events_per_minute=20.0),
        per_type=3,
        evidence="minutes",
        delays_s=(0, 60, 220),
        types=TIME_TYPES,
        model=EMBEDDED_ORDER,
    ),
    "hour": Study(
        _compare_compact,
        # 1/250, 1/500 and 1/1,000 of 32,400 tokens.
        budgets=(130, 65, 32),
        seeds=STUDY[2100:2104],
        length_s=3660,
        distractors=_ALIKE,
        per_type=3,
        before=0,
        delays_s=(0, 600, 1800, 3600),
        types=_CONTENT,
    ),
    "decay": Study(
        _vary_paper({row: _ABLATION[row] for row in _DECAYS}),
        # 1/2 and 1/10 of 4,320 tokens.
        budgets=(2160, 432),
        seeds=STUDY[2200:2204],
        length_s=480,
        distractors=Distractors(events_per_minute=20.0),
        before=120,
        per_type=3,
        delays_s=(0, 90, 200, 300),
        types=_CONTENT,
    ),
    "modes": Study(
        _compare_modes,
        budgets=(43, 22, 11, 5, 61, 40, 30, 24, 13, 134, 68, 33),
        seeds=STUDY[2300:2308],
        length_s=480,
        distractors=Distractors(events_per_minute=20.0),
        before=120,
        per_type=3,
        delays_s=(0, 60, 220),
        types=_CONTENT,
    ),
    "budgets": Study(_compare_around),
    # Codebooks are fitted to the first 512 residuals of a head, at about step 63: before that residuals show nothing.
    "ablation": Study(_vary_paper(_ABLATION), before=120, delays_s=(0, 30, 90, 160)),
    "anchors": Study(_vary_paper(_ANCHORS)),
    "allocation": Study(_vary_paper(_ALLOCATION)),
    "splits": Study(_vary_paper(_SPLITS)),
    "coefficients": Study(_sweep_coefficients),
}
