"""`DurableConfig`: the settings of the agglomerative bank, the default memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from protokv.config.prototypes import PrototypeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig(PrototypeConfig):
    """What keeps evidence longest by our own study (`samples/delay-study/`): the agglomerative bank, S = 1.

    What is distinct stays and what is redundant is merged (`protokv.memory.protokv.policies.agglomerative`), so a brief
    cue that is not seen again, the very evidence that a late question is about, is the last thing to go. Residual
    statistics are off: with S = 1 they show nothing.

    Attributes:
        merge_mass_power: in the cost of a merge a prototype of mass n weighs n to this power: 1 is Ward's cost, 0 takes
            no notice of the mass.
    """

    name: ClassVar[str] = "durable"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"merge_mass_power": (0, 1)}

    pseudo_tokens: int = 1
    residual: bool = False
    merge_mass_power: float = 1.0
