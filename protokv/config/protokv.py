"""`ProtoKVConfig`: every constant of the paper's memory and of ours, and the presets.

The defaults are the paper's table (appendix B); each alternative that the paper reports or leaves open is a field whose
default is the paper's choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Final, Literal

from protokv.config.base import MemoryConfig, check_range
from protokv.errors import ConfigError

Allocation = Literal["fixed", "variance"]
Anchor = Literal["recent", "first", "average"]
Decay = Literal["floor", "off"]
Histograms = Literal["independent", "joint"]
MassBias = Literal["log_n", "log_n_over_s", "off"]
Policy = Literal["continuity", "agglomerative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtoKVConfig(MemoryConfig):
    """A near window and a bank of prototypes, `budget = W + K * S`; the defaults are the paper's.

    Attributes:
        policy: how evicted tokens enter the bank: "continuity" is the paper's Algorithms 1 and 2; "agglomerative" is
            ours (`protokv.memory.protokv.agglomerative`), for which the rates, the spatial and idle terms, decay,
            merging by distance and recycling have no meaning.
        merge_mass_power: in the cost of an agglomerative merge a prototype of mass n weighs n to this power: 1 is
            Ward's cost, 0 takes no notice of the mass.
        split: near : far, `W : K * S`. (1, 0) is near only, (0, 1) is far only.
        pseudo_tokens: S, pseudo-tokens that show one prototype.
        spatial_weight: lambda_sp, weight of the squared Mahalanobis distance; 0 turns the term off.
        idle_weight: lambda_idle, added to the cost of an idle prototype.
        idle_steps: T_idle; a prototype is idle when it has absorbed nothing for more than this many steps.
        key_rate: alpha, EMA rate of the key centre.
        value_rate: beta, EMA rate of the value centre.
        spatial_rate: eta, EMA rate of mu and Sigma.
        anchor: the rotary position of a prototype: that of the most recently absorbed token, of the first
            one, or the mean over all of them.
        decay: "floor" is n <- floor((1 - gamma) n) for idle prototypes; "off" never forgets by age.
        decay_rate: gamma.
        merge: whether prototypes with close centres are merged.
        merge_key_distance, merge_value_distance: eps_K and eps_V, root-mean-square distances per component.
        recycle: whether freed slots are opened again with tokens of the newest step.
        residual: whether residual statistics are kept; without them all S pseudo-tokens are the centre.
        subquantizers: G; must divide the head size.
        codewords: C, codewords of each subquantizer.
        histograms: what is counted: the codes of keys and of values apart, whose modes are then paired by rank; or
            "joint", pairs of a key code and a value code (the paper's H^KV), at C times half the bytes.
        allocation: "fixed" shows every prototype as S pseudo-tokens; "variance" deals out the same K * S in proportion
            to the variance of the residuals of each (`protokv.memory.protokv.allocation`).
        beam_per_mode: the beam of the decoder is B = beam_per_mode * S.
        smoothing: epsilon of the histogram probabilities. The paper leaves it open; 1e-5 is the value in its
            first author's code.
        warmup_residuals: residuals of each head that its codebooks are fitted to, the first ones of the
            stream. The paper leaves T_warm open; 512 is the sample size in its first author's scripts.
        kmeans_iterations: Lloyd iterations of that fit.
        mass_bias: what is added to the logit of a pseudo-token: log n, log(n / S), or nothing.
    """

    kind: ClassVar[str] = "protokv"
    policy: Policy = "continuity"
    merge_mass_power: float = 1.0
    split: tuple[int, int] = (1, 3)
    pseudo_tokens: int = 8
    spatial_weight: float = 0.1
    idle_weight: float = 0.01
    idle_steps: int = 120
    key_rate: float = 0.05
    value_rate: float = 0.05
    spatial_rate: float = 0.05
    anchor: Anchor = "recent"
    decay: Decay = "floor"
    decay_rate: float = 0.05
    merge: bool = True
    merge_key_distance: float = 0.20
    merge_value_distance: float = 0.25
    recycle: bool = True
    residual: bool = True
    subquantizers: int = 8
    codewords: int = 16
    histograms: Histograms = "independent"
    allocation: Allocation = "fixed"
    beam_per_mode: int = 4
    smoothing: float = 1e-5
    warmup_residuals: int = 512
    kmeans_iterations: int = 10
    mass_bias: MassBias = "log_n"

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that this body belongs to.
        MemoryConfig.__post_init__(self)
        for name in ("pseudo_tokens", "subquantizers", "beam_per_mode"):
            check_range(name, getattr(self, name), 1, None)
        for name in ("idle_steps", "kmeans_iterations"):
            check_range(name, getattr(self, name), 0, None)
        for name in ("spatial_weight", "idle_weight", "merge_key_distance", "merge_value_distance"):
            check_range(name, getattr(self, name), 0, None)
        for name in ("key_rate", "value_rate", "spatial_rate", "decay_rate", "merge_mass_power"):
            check_range(name, getattr(self, name), 0, 1)
        check_range("codewords", self.codewords, 2, 256)
        check_range("warmup_residuals", self.warmup_residuals, self.codewords, None)
        check_range("smoothing", self.smoothing, 1e-12, 1)
        if self.allocation == "variance" and not self.residual:
            raise ConfigError(
                "allocation: 'variance' is that of the residuals, and residual is off",
                hint="turn residual on, or leave allocation at 'fixed'",
            )
        near, far = self.split
        if near < 0 or far < 0 or near + far == 0:
            raise ConfigError(f"split: expected two counts, not negative and not both 0, got {near}:{far}")
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

    @property
    def kept_mass(self) -> Fraction:
        """1 - gamma, exactly as the decimal was written, so that floor((1 - 0.05) * 20) is 19."""
        return 1 - Fraction(repr(self.decay_rate)).limit_denominator(1_000_000)

    @property
    def name(self) -> str:
        """The preset that this is, whatever its seed; else "custom"."""
        unseeded = replace(self, seed=0)
        presets = (preset for preset in PRESETS if unseeded == ProtoKVConfig.preset(preset, self.budget))
        return next(presets, "custom")

    @classmethod
    def paper(cls, budget: int) -> ProtoKVConfig:
        """The paper's table to the letter."""
        return cls(budget=budget)

    @classmethod
    def durable(cls, budget: int) -> ProtoKVConfig:
        """What keeps evidence longest by our own study (`samples/delay-study/`): the agglomerative bank, S = 1.

        What is distinct stays and what is redundant is merged, so a brief cue that is not seen again, the very evidence
        that a late question is about, is the last thing to go. Residual statistics are off: with S = 1 they show
        nothing. Decay, merging by distance and recycling have no meaning for this policy; they are off, so that a state
        says so.
        """
        return cls(budget=budget, policy="agglomerative", pseudo_tokens=1, **_WITHOUT_UPKEEP)

    @classmethod
    def continuity(cls, budget: int) -> ProtoKVConfig:
        """The paper's assignment, with what loses evidence taken out: S = 1, no idle decay.

        Faster to update than `durable`, and as good while a stream is compressed 50 times or less
        (`samples/delay-study/`). Merging stays: two centres closer than its thresholds say one thing twice, and the
        slot that it frees is opened by the next evicted token. Recycling goes: it copies a token of the near window
        into that slot, which is then counted a second time when it leaves the window.
        """
        return cls(budget=budget, pseudo_tokens=1, **(_WITHOUT_UPKEEP | {"merge": True}))

    @classmethod
    def preset(cls, name: str, budget: int) -> ProtoKVConfig:
        """A preset by its name: "paper", "durable" or "continuity".

        Raises:
            ConfigError: there is no such preset.
        """
        if name not in PRESETS:
            raise ConfigError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
        config: ProtoKVConfig = getattr(cls, name)(budget)
        return config


PRESETS = ("paper", "durable", "continuity")

_WITHOUT_UPKEEP: Final[dict[str, Any]] = {"decay": "off", "merge": False, "recycle": False, "residual": False}
