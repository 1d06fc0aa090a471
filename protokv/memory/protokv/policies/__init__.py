"""The rules by which tokens enter a bank: the paper's, and agglomerative clustering."""

from __future__ import annotations

from protokv.config import DurableConfig, PrototypeConfig
from protokv.memory.protokv.policies.agglomerative import Agglomerative
from protokv.memory.protokv.policies.blocked.rule import BlockedRule
from protokv.memory.protokv.policies.paper import PaperRule
from protokv.memory.protokv.policy import Policy

__all__ = ["find_policy"]


def find_policy(config: PrototypeConfig) -> type[Policy]:
    """The rule that the settings ask for."""
    if not isinstance(config, DurableConfig):
        return PaperRule
    return BlockedRule if config.is_blocked else Agglomerative
