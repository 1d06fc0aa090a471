"""The paper's tables as studies: which data sets, memories, budgets and delays stand in each.

The numbers are those of the tables in the order of the paper (arXiv 2606.26762). Frame rates are the model's own (0.5 a
second of LLaVA-OneVision) and its preprocessing decides the tokens of a frame. The paper caps Qwen-VL at 49,920 visual
tokens before compression, which a stream without a known end cannot, so its rate stands beside every number instead.
Table 5 lists settings and table 8 examples: nothing is run for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from protokv.errors import ConfigError
from protokv.replay.runner import Variant
from protokv.replay.studies import STUDIES, name_memories

MINUTE: Final = 60.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One data set of a table.

    Attributes:
        dataset: its name.
        budgets: visual tokens kept.
        memories: at one budget.
        delays_s: behind the time of asking.
    """

    dataset: str
    budgets: tuple[int, ...]
    memories: Callable[[int], list[Variant]]
    delays_s: tuple[float, ...] = (0.0,)

    def variants(self, budgets: Sequence[int] | None = None) -> list[Variant]:
        """The memories at each budget, the table's own where none is given."""
        return [variant for budget in budgets or self.budgets for variant in self.memories(budget)]


@dataclass(frozen=True, slots=True)
class Preset:
    """A table.

    Attributes:
        title: what it shows.
        models: the paper's, as the hub names them.
        cells: one per data set.
    """

    title: str
    models: tuple[str, ...]
    cells: tuple[Cell, ...]

    def cell(self, dataset: str) -> Cell:
        """The part of one data set.

        Raises:
            ConfigError: the table has none of it.
        """
        for cell in self.cells:
            if cell.dataset == dataset:
                return cell
        names = ", ".join(cell.dataset for cell in self.cells)
        raise ConfigError(f"this table has no {dataset}", hint=f"name one of {names} with --dataset")


_LLAVA: Final = "llava-hf/llava-onevision-qwen2-7b-ov-hf"
_QWEN_2: Final = "Qwen/Qwen2-VL-7B-Instruct"
_QWEN_2_5: Final = "Qwen/Qwen2.5-VL-7B-Instruct"

_DELAYS: Final = tuple(minutes * MINUTE for minutes in (0, 5, 10, 20, 30))


def _compare(budget: int) -> list[Variant]:
    return name_memories(("paper", "sliding-window", "infinipot-v", "durable", "hermes"), [budget])


def _retrieve(budget: int) -> list[Variant]:
    return name_memories(("paper", "rekv", "durable"), [budget])


def _offline(budget: int) -> list[Variant]:
    return name_memories(("paper", "infinipot-v", "dycoke", "durable"), [budget])


def _of_study(name: str) -> Callable[[int], list[Variant]]:
    return STUDIES[name].memories


_STREAMING: Final = (
    Cell("rvs-ego", (24_000,), _compare),
    Cell("rvs-movie", (24_000,), _compare),
    Cell("ovo-bench", (4_000,), _compare),
    Cell("streamingbench", (4_000,), _compare),
)

PRESETS: Final[dict[str, Preset]] = {
    "paper-table-1": Preset("streaming benchmarks", (_LLAVA, _QWEN_2_5), _STREAMING),
    "paper-table-2": Preset(
        "component ablations", (_LLAVA,), (Cell("rvs-ego", (24_000,), _of_study("ablation"), (0.0, 30 * MINUTE)),)
    ),
    "paper-table-3": Preset(
        "offline benchmarks",
        (_QWEN_2,),
        (Cell("videomme", (3_000, 6_000), _offline), Cell("mlvu", (3_000, 6_000), _offline)),
    ),
    "paper-table-4": Preset("beside retrieval", (_LLAVA,), (Cell("rvs-ego", (24_000,), _retrieve),)),
    "paper-table-6": Preset(
        "budget allocation", (_QWEN_2_5,), (Cell("rvs-ego", (24_000,), _of_study("splits"), (0.0, 30 * MINUTE)),)
    ),
    "paper-table-7": Preset(
        "coefficients",
        (_QWEN_2_5,),
        tuple(Cell(name, (24_000,), _of_study("coefficients")) for name in ("rvs-ego", "rvs-movie")),
    ),
    "paper-table-9": Preset("rotary anchors", (_QWEN_2_5,), (Cell("rvs-ego", (24_000,), _of_study("anchors")),)),
    "paper-table-10": Preset("tasks of MLVU", (_QWEN_2,), (Cell("mlvu", (6_000,), _offline),)),
    "paper-table-11": Preset(
        "variance-aware allocation",
        (_QWEN_2_5,),
        (Cell("rvs-ego", (24_000,), _of_study("allocation"), (0.0, 30 * MINUTE)),),
    ),
    "paper-delays": Preset(
        "the delay sweep (figure)",
        (_LLAVA, _QWEN_2_5),
        (
            Cell("rvs-ego", (24_000,), _compare, _DELAYS),
            Cell("rvs-movie", (24_000,), _compare, _DELAYS),
            Cell("ovo-bench", (4_000,), _compare, _DELAYS),
        ),
    ),
}
"""The tables that can be run, by their names."""
