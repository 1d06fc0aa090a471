"""Settings of older states in today's form.

Until format 2 the memories `paper`, `continuity` and `durable` were one kind, `protokv`, with the settings of both
rules and a setting `policy` between them. Later, `durable` took the blocked rule from 4,096 prototypes on, and had no
setting that said so; and all centres were of 32 bits, which no setting said either. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from protokv.config.base import MemoryConfig
from protokv.config.durable import DurableConfig
from protokv.config.paper import ContinuityConfig, PaperConfig

_OLD_KIND: Final = "protokv"
_OLD_BLOCKED_FROM: Final = 4096
# What a setting was where a state does not say; all others had the paper's default.
_OLD_BITS: Final = 32
_OLD_DEFAULTS: Final[Mapping[str, Any]] = {
    "policy": "continuity",
    "merge_mass_power": 1.0,
    "rule": "exact",
    "center_bits": _OLD_BITS,
}


def migrate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The memory settings of a state of any format, with the name of the memory as `kind`.

    Settings that have no meaning for the memory are left out. The paper's rule is called `continuity` where the state
    has all settings by which that differs from `paper`, else `paper`. Whatever is unknown stays, so that
    `MemoryConfig.from_dict` refuses it by name.
    """
    if settings.get("kind") == DurableConfig.name:
        settings = {"center_bits": _OLD_BITS, **settings}
        if "blocked_from" not in settings:
            return _with_its_rule(settings)
    if settings.get("kind") != _OLD_KIND:
        return dict(settings)
    old = {**PaperConfig().to_dict(), **_OLD_DEFAULTS, **settings}
    cls: type[MemoryConfig] = DurableConfig
    if old.pop("policy") != "agglomerative":
        cls = ContinuityConfig if all(old[name] == value for name, value in _CONTINUITY.items()) else PaperConfig
    of_other_rule = {field.name for one in (PaperConfig, DurableConfig) for field in fields(one)}
    of_other_rule -= {field.name for field in fields(cls)}
    return {name: value for name, value in old.items() if name not in of_other_rule} | {"kind": cls.name}


def _with_its_rule(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under which the rule is the one that made the state; those of today where that is the same."""
    today = DurableConfig.from_dict(settings)
    then = DurableConfig.from_dict({**settings, "blocked_from": _OLD_BLOCKED_FROM})
    same = isinstance(today, DurableConfig) and isinstance(then, DurableConfig) and today.is_blocked == then.is_blocked
    return dict(settings) if same else {**settings, "blocked_from": _OLD_BLOCKED_FROM}


_CONTINUITY: Final = {
    name: value
    for name, value in ContinuityConfig().to_dict().items()
    if name != "kind" and value != PaperConfig().to_dict()[name]
}
