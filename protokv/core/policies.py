"""The rules by which tokens enter a bank: the paper's, and agglomerative clustering."""

from __future__ import annotations

from protokv.config import DurableConfig, PrototypeConfig
from protokv.core.bank import Policy
from protokv.core.paper_rule import PaperRule
from protokv.durable.agglomerative import Agglomerative
from protokv.durable.blocked import BlockedRule

__all__ = ["find_policy"]


def find_policy(config: PrototypeConfig) -> type[Policy]:
    """The rule that the settings ask for."""
    if not isinstance(config, DurableConfig):
        return PaperRule
    return BlockedRule if config.is_blocked else Agglomerative
