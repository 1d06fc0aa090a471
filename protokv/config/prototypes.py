"""`PrototypeConfig`: settings that all memories with a bank of prototypes share.

Owns the arithmetic of the budget, `budget = W + K * S`, and the settings of residual statistics and of the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from protokv.config.base import MemoryConfig
from protokv.errors import ConfigError

Allocation = Literal["fixed", "variance"]
Anchor = Literal["recent", "first", "average"]
Histograms = Literal["independent", "joint"]
MassBias = Literal["log_n", "log_n_over_s", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrototypeConfig(MemoryConfig):
    """A near window of W exact tokens and a bank of K prototypes that are shown as S pseudo-tokens each.

    Attributes:
        split: near : far, `W : K * S`. (1, 0) is near only, (0, 1) is far only.
        pseudo_tokens: S, pseudo-tokens that show one prototype.
        anchor: the rotary position of a prototype: that of its newest token, of its first, or the mean of all.
        residual: True to keep residual statistics; without them all S pseudo-tokens are the centre.
        subquantizers: G; must divide the head size.
        codewords: C, codewords of each subquantizer.
        histograms: "independent" counts the codes of keys and of values separately and pairs their modes by rank;
            "joint" counts pairs of a key code and a value code (the paper's H^KV), at C / 2 times the bytes.
        allocation: "fixed" shows every prototype as S pseudo-tokens; "variance" distributes the same K * S in
            proportion to the variance of each prototype's residuals (`protokv.extras.allocation`).
        warmup_residuals: the first residuals of the stream, to which the codebooks of a head are fitted. The paper
            leaves T_warm open; 512 is the sample size in its first author's scripts.
        mass_bias: the bias added to the logit of a pseudo-token: log n, log(n / S), or 0.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "split": (0, 1_000_000),
        "pseudo_tokens": (1, 1024),
        "subquantizers": (1, 1024),
        "codewords": (2, 256),
        "warmup_residuals": (2, 1_000_000),
    }

    split: tuple[int, int] = (1, 3)
    pseudo_tokens: int = 8
    anchor: Anchor = "recent"
    residual: bool = True
    subquantizers: int = 8
    codewords: int = 16
    histograms: Histograms = "independent"
    allocation: Allocation = "fixed"
    warmup_residuals: int = 512
    mass_bias: MassBias = "log_n"

    def check(self) -> None:
        """Refuse a split that leaves nothing, too small a budget, and residual settings that contradict each other."""
        if self.warmup_residuals < self.codewords:
            raise ConfigError(
                f"warmup_residuals: expected at least as many as codewords, {self.codewords}, "
                f"got {self.warmup_residuals}"
            )
        if self.allocation == "variance" and not self.residual:
            raise ConfigError(
                "allocation: 'variance' needs the variance of residuals, and residual is off",
                hint="turn residual on, or leave allocation at 'fixed'",
            )
        near, far = self.split
        if near + far == 0:
            raise ConfigError(f"split: expected two counts, not both 0, got {near}:{far}")
        if self.near_tokens < (near > 0):
            raise ConfigError(
                f"budget: {self.budget} tokens leave no near window beside one prototype "
                f"of {self.pseudo_tokens} pseudo-tokens",
                hint=f"use a budget of at least {self.pseudo_tokens + (near > 0)} or fewer pseudo_tokens",
            )

    @property
    def prototypes(self) -> int:
        """K, prototypes of each layer and KV head: the far share of the budget over S, at least 1."""
        near, far = self.split
        if far == 0:
            return 0
        return max(1, self.budget * far // (near + far) // self.pseudo_tokens)

    @property
    def near_tokens(self) -> int:
        """W, exact tokens of the near window: what the prototypes leave of the budget."""
        return self.budget - self.prototypes * self.pseudo_tokens
