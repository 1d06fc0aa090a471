"""Studies: memories to compare, on procedural streams, data sets or text, read from one TOML file
each.

The fields are those of `Study`, `Entry`, `Dataset`, `Worlds` and `Language`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from protokv.errors import ConfigError, suggest_name
from protokv.memories import DEFAULT_MEMORY, MemoryConfig
from protokv.replay.memories import MemoryVariant, drop_repeated_variants
from samples.worlds.language import Language
from samples.worlds.streams import Worlds

FOLDER: Final = Path(__file__).parents[1] / "studies"
"""Its .toml files are named without folder and suffix."""


def list_studies() -> list[str]:
    """Return the names of all studies."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of a table: a memory with some settings changed.

    Attributes:
        memory: its name.
        label: its name in the table; empty: that of the memory.
        set: setting -> value.
        budgets: the budgets of the study that run this row; empty: all. Any other budget runs every
            row.
    """

    memory: str
    label: str = ""
    set: dict[str, Any] = msgspec.field(default_factory=dict)
    budgets: tuple[int, ...] = ()

    def variant(self, budget: int) -> MemoryVariant:
        """Return the memory at a budget."""
        config = MemoryConfig.of(self.memory, budget=budget).with_fields(self.set)
        return MemoryVariant(self.label or self.memory, config)


class Dataset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published data set on which the memories are compared too.

    Attributes:
        name: of the data set.
        budgets: visual tokens kept.
        delays_s: seconds behind the time of asking.
    """

    name: str
    budgets: tuple[int, ...]
    delays_s: tuple[float, ...] = (0.0,)


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memories to compare, and what they are compared on.

    Attributes:
        title: what the study shows.
        memories: names, or rows with settings.
        model: the embedded model that reads the worlds.
        worlds: procedural streams; None: the study is about data sets alone.
        budgets: visual tokens kept on these streams.
        delays_s: seconds behind the evidence.
        types: types of questions to ask; None: those whose answer lasts.
        datasets: published data sets.
        language: streams of text; a study of text has no other streams.
        models: the models of the paper's table, as the hub names them.
    """

    title: str
    memories: tuple[Entry | str, ...]
    model: str = "protokv/mini"
    worlds: Worlds | None = None
    budgets: tuple[int, ...] = (72,)
    delays_s: tuple[float, ...] = (0, 30, 120, 160)
    types: tuple[str, ...] | None = None
    datasets: tuple[Dataset, ...] = ()
    language: Language | None = None
    models: tuple[str, ...] = ()

    def variants(self, budgets: Sequence[int]) -> list[MemoryVariant]:
        """Return the memories at each budget; see `drop_repeated_variants`.

        Raises:
            ConfigError: a memory or setting is unknown, or does not fit a budget.
        """
        entries = [Entry(one) if isinstance(one, str) else one for one in self.memories]
        return drop_repeated_variants(
            [
                entry.variant(budget)
                for budget in budgets
                for entry in entries
                if not entry.budgets or budget in entry.budgets or budget not in self.budgets
            ]
        )

    def default_budgets(self, model: str) -> Sequence[int]:
        """Return the study's budgets for an embedded model, whose steps have nine tokens, and else
        the usual one.
        """
        return (
            self.budgets
            if model.startswith("protokv/mini")
            else [MemoryConfig.of(DEFAULT_MEMORY).budget]
        )

    def dataset(self, name: str) -> Dataset | None:
        """Return the part about a data set; None if the study has no data sets.

        Raises:
            ConfigError: the study has other data sets.
        """
        found = next((one for one in self.datasets if one.name == name), None)
        if found is None and self.datasets:
            names = [one.name for one in self.datasets]
            raise ConfigError(
                f"this study has no {name}", hint=suggest_name(name, names, others="with --dataset")
            )
        return found


def load_study(name: str) -> Study:
    """Read a study by its name, or by the path of its file.

    Raises:
        ConfigError: there is none, or its file is not as it should be.
    """
    path = FOLDER / f"{name}.toml" if name in list_studies() else Path(name)
    try:
        if path.suffix != ".toml":
            known = suggest_name(name, list_studies(), others="or the path of a .toml file")
            raise ConfigError(f"there is no study {name!r}", hint=known)
        text = path.read_text(encoding="utf-8")
        study = msgspec.convert(tomllib.loads(text), Study)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the study {name} cannot be read: {error}", hint="name a .toml file of a study"
        ) from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{name} is not a study: {error}", hint="samples/studies/ has examples"
        ) from error
    if study.worlds is None and not study.datasets and study.language is None:
        raise ConfigError(f"{name} is not a study: it has no streams", hint="add a table [worlds]")
    return study
