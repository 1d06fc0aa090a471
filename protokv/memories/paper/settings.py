"""`PaperConfig` and `ContinuityConfig`: what the paper's tables vary.

Dynamic allocation and joint histograms are not here. When the idle rule acts is our reading: the
text speaks of T_idle = 120 "steps", and Algorithm 2 runs "after every absorption". Here a step is a
frame or a temporal patch. `samples/studies/delay/` has both readings (`decay`), and T_idle in the
paper's seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from protokv.core.prototypes import PrototypeConfig
from protokv.core.settings import ShareSetting, WeightSetting
from protokv.errors import ConfigError

_Anchor = Literal["recent", "first", "average"]
_MassBias = Literal["log_n", "log_n_over_s", "off"]
_Decay = Literal["floor", "interval", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperConfig(PrototypeConfig):
    """The paper's Algorithms 1 to 4; the defaults are its table to the letter.

    Attributes:
        pseudo_tokens: S, pseudo-tokens that show one prototype.
        anchor: the rotary position of a prototype: that of its newest token, of its first, or the
            mean of all.
        residual: True to keep residual statistics; without them all S pseudo-tokens are the centre.
        subquantizers: G; must divide the head size.
        codewords: C, codewords of each subquantizer.
        warmup_residuals: the first residuals of the stream, to which the codebooks of a head are
            fitted. The paper leaves T_warm open; 512 is the sample size in its first author's
            scripts.
        mass_bias: the bias added to the logit of a pseudo-token: log n, log(n / S), or 0.
        spatial_weight: lambda_sp, weight of the squared Mahalanobis distance; 0 turns the term off.
        idle_weight: lambda_idle, added to the cost of an idle prototype.
        idle_steps: T_idle; a prototype is idle when it has absorbed nothing for more than this many
            steps.
        key_rate: alpha, EMA rate of the key centre.
        value_rate: beta, EMA rate of the value centre.
        spatial_rate: eta, EMA rate of mu and Sigma.
        decay: when n <- floor((1 - gamma) n) happens to an idle prototype. "floor": in each step;
            "interval": once each T_idle steps that it stays idle (in the first step after them, if
            tokens leave the near window in that step); "off": never.
        decay_rate: gamma.
        merge: whether prototypes with close centres are merged.
        merge_key_distance, merge_value_distance: eps_K and eps_V, root-mean-square distances per
            component.
        recycle: whether freed slots are opened again with tokens of the newest step.
    """

    name: ClassVar[str] = "paper"

    pseudo_tokens: Annotated[int, 1, 1024] = 8
    anchor: _Anchor = "recent"
    residual: bool = True
    subquantizers: Annotated[int, 1, 1024] = 8
    codewords: Annotated[int, 2, 256] = 16
    warmup_residuals: Annotated[int, 2, 1_000_000] = 512
    mass_bias: _MassBias = "log_n"
    spatial_weight: WeightSetting = 0.1
    idle_weight: WeightSetting = 0.01
    idle_steps: Annotated[int, 0, 2**31] = 120
    key_rate: ShareSetting = 0.05
    value_rate: ShareSetting = 0.05
    spatial_rate: ShareSetting = 0.05
    decay: _Decay = "floor"
    decay_rate: ShareSetting = 0.05
    merge: bool = True
    merge_key_distance: WeightSetting = 0.20
    merge_value_distance: WeightSetting = 0.25
    recycle: bool = True

    def check(self) -> None:
        """Refuse a reservoir of fewer residuals than codewords."""
        super(PaperConfig, self).check()
        if self.warmup_residuals < self.codewords:
            raise ConfigError(
                f"warmup_residuals: expected {self.codewords} or more, got {self.warmup_residuals}"
            )

    @property
    def slots_per_prototype(self) -> int:
        """S, pseudo-tokens that show one prototype."""
        return self.pseudo_tokens

    @property
    def kept_mass(self) -> Fraction:
        """1 - gamma, exactly as the decimal was written, so that floor((1 - 0.05) * 20) is 19."""
        return 1 - Fraction(repr(self.decay_rate)).limit_denominator(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuityConfig(PaperConfig):
    """The paper's assignment, with what loses evidence taken out: S = 1, no idle decay.

    Faster to update than `durable`, and as good only for what came while slots were free: of
    content shown after two minutes of distraction it answers .26 at 1/45 of the tokens, where
    `durable` answers .97 (`samples/studies/delay/`). Recycling goes too: it copies a token of the
    near window, which is counted again when it leaves the window.
    """

    name: ClassVar[str] = "continuity"

    pseudo_tokens: Annotated[int, 1, 1024] = 1
    residual: bool = False
    decay: _Decay = "off"
    recycle: bool = False
