"""Settings of the memories with a bank of prototypes: what all of them share, the paper's, and those of `continuity`.

Source: ProtoKV (ICML 2026), arXiv 2606.26762, appendix B. Each alternative that the paper reports or leaves open is a
field whose default is the paper's choice.

What is the paper's, what is scale, what is our reading:

- The paper's are the rule and its constants. With them K_max is 2,250 at |M| = 24,000, and its runs keep 1/2 to 1/15 of
  the visual tokens.
- Scale is K: it follows from the budget, 14 at 151 tokens. What a bank of 14 loses says little about one of 2,250.
- Our reading is when the idle rule acts. Its text speaks of T_idle = 120 "steps" and its Algorithm 2 of the "current
  time", run "after every absorption". Here a step is a frame or a temporal patch, and an idle prototype decays in each
  (`decay="floor"`): one of mass 1 is gone in its first idle step, one of mass 20 after 20 of them. Once each T_idle
  (`decay="interval"`) is a reading too. At the paper's 0.5 frames a second 120 steps are 240 seconds, where the
  procedural streams of our studies have a step a second: `idle_steps=240` is the same time there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from protokv.core.settings import MOST_WEIGHT, MemoryConfig
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
            proportion to the variance of each prototype's residuals (`protokv.memories.paper.allocation`).
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
        return max(1, self.merged_budget * far // (near + far) // self.pseudo_tokens)

    @property
    def near_tokens(self) -> int:
        """W, exact tokens of the near window: what the prototypes leave of the budget."""
        return self.merged_budget - self.prototypes * self.pseudo_tokens

    @property
    def merged_budget(self) -> int:
        """Return what of the budget the near window and the prototypes have."""
        return self.budget


Decay = Literal["floor", "interval", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperConfig(PrototypeConfig):
    """The paper's Algorithms 1 and 2; the defaults are its table to the letter.

    Attributes:
        spatial_weight: lambda_sp, weight of the squared Mahalanobis distance; 0 turns the term off.
        idle_weight: lambda_idle, added to the cost of an idle prototype.
        idle_steps: T_idle; a prototype is idle when it has absorbed nothing for more than this many steps.
        key_rate: alpha, EMA rate of the key centre.
        value_rate: beta, EMA rate of the value centre.
        spatial_rate: eta, EMA rate of mu and Sigma.
        decay: when n <- floor((1 - gamma) n) happens to an idle prototype. "floor": in each step; "interval": once each
            T_idle steps that it stays idle (in the first step behind them, if tokens leave the near window in that
            step); "off": never.
        decay_rate: gamma.
        merge: whether prototypes with close centres are merged.
        merge_key_distance, merge_value_distance: eps_K and eps_V, root-mean-square distances per component.
        recycle: whether freed slots are opened again with tokens of the newest step.
    """

    name: ClassVar[str] = "paper"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "spatial_weight": (0, MOST_WEIGHT),
        "idle_weight": (0, MOST_WEIGHT),
        "idle_steps": (0, 2**31),
        "key_rate": (0, 1),
        "value_rate": (0, 1),
        "spatial_rate": (0, 1),
        "decay_rate": (0, 1),
        "merge_key_distance": (0, MOST_WEIGHT),
        "merge_value_distance": (0, MOST_WEIGHT),
    }

    spatial_weight: float = 0.1
    idle_weight: float = 0.01
    idle_steps: int = 120
    key_rate: float = 0.05
    value_rate: float = 0.05
    spatial_rate: float = 0.05
    decay: Decay = "floor"
    decay_rate: float = 0.05
    merge: bool = True
    merge_key_distance: float = 0.20
    merge_value_distance: float = 0.25
    recycle: bool = True

    @property
    def kept_mass(self) -> Fraction:
        """1 - gamma, exactly as the decimal was written, so that floor((1 - 0.05) * 20) is 19."""
        return 1 - Fraction(repr(self.decay_rate)).limit_denominator(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuityConfig(PaperConfig):
    """The paper's assignment, with what loses evidence taken out: S = 1, no idle decay.

    Faster to update than `durable`, and as good only for what came while slots were free: of content shown after two
    minutes of distraction it answers .26 at 1/45 of the tokens, where `durable` answers .97 (`samples/studies/delay/`).

    Merging stays: two centres closer than its thresholds say one thing twice, and the slot that it frees is opened by
    the next evicted token. Recycling goes: it copies a token of the near window into that slot, which is then counted
    a second time when it leaves the window.
    """

    name: ClassVar[str] = "continuity"

    pseudo_tokens: int = 1
    residual: bool = False
    decay: Decay = "off"
    recycle: bool = False
