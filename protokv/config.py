"""`MemoryConfig`: which memory, how large, and every constant of it.

The defaults are the paper's table (appendix B) for its method; each alternative that the paper reports or
leaves open is a field whose default is the paper's choice. Knows nothing of tensors: sizes that depend on the
model (the head size must be divisible by the subquantizers) are checked when the memory is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from typing import Any, Literal, get_args, get_origin, get_type_hints

from protokv.errors import ConfigError

Anchor = Literal["recent", "first", "average"]
Decay = Literal["floor", "off"]
EncodeWith = Literal["all", "near"]
MassBias = Literal["log_n", "log_n_over_s", "off"]

_UNITS = {"": 1, "k": 1_000, "m": 1_000_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """A memory and its constants; the defaults are the paper's.

    Attributes:
        kind: name in `protokv.memory.MEMORIES`: "protokv", "sliding-window" or "full". The other two read
            only `budget` and `encode_with`.
        budget: |M|, visual tokens that attention may read at query time: `W + K * S`. The prompt prefix is
            kept besides. "full" is not bounded; there it is the number of tokens that it makes room for at
            first.
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
        beam_per_mode: the beam of the decoder is B = beam_per_mode * S.
        smoothing: epsilon of the histogram probabilities. The paper leaves it open; 1e-5 is the value in its
            first author's code.
        warmup_residuals: residuals of each head that its codebooks are fitted to, the first ones of the
            stream. The paper leaves T_warm open; 512 is the sample size in its first author's scripts.
        kmeans_iterations: Lloyd iterations of that fit.
        mass_bias: what is added to the logit of a pseudo-token: log n, log(n / S), or nothing.
        encode_with: what a new step attends to while it is encoded: the whole memory, or its exact tokens
            only.
        seed: of the generator that draws the tokens for recycled slots.
    """

    kind: str = "protokv"
    budget: int = 6000
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
    beam_per_mode: int = 4
    smoothing: float = 1e-5
    warmup_residuals: int = 512
    kmeans_iterations: int = 10
    mass_bias: MassBias = "log_n"
    encode_with: EncodeWith = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), hints[field.name])
        for name in ("budget", "pseudo_tokens", "subquantizers", "beam_per_mode"):
            _check_range(name, getattr(self, name), 1, None)
        for name in ("idle_steps", "kmeans_iterations", "seed"):
            _check_range(name, getattr(self, name), 0, None)
        for name in ("spatial_weight", "idle_weight", "merge_key_distance", "merge_value_distance"):
            _check_range(name, getattr(self, name), 0, None)
        for name in ("key_rate", "value_rate", "spatial_rate", "decay_rate"):
            _check_range(name, getattr(self, name), 0, 1)
        _check_range("codewords", self.codewords, 2, 256)
        _check_range("warmup_residuals", self.warmup_residuals, self.codewords, None)
        _check_range("smoothing", self.smoothing, 1e-12, 1)
        near, far = self.split
        if near < 0 or far < 0 or near + far == 0:
            raise ConfigError(f"split: expected two counts, not negative and not both 0, got {near}:{far}")
        if self.kind == "protokv" and self.near_tokens < (near > 0):
            raise ConfigError(
                f"budget: {self.budget} tokens leave no near window beside one prototype "
                f"of {self.pseudo_tokens} pseudo-tokens",
                hint=f"use a budget of at least {self.pseudo_tokens + (near > 0)} or fewer pseudo_tokens",
            )

    @property
    def prototypes(self) -> int:
        """K, prototypes of each layer and KV head: the far share of the budget over S, at least 1."""
        near, far = self.split
        if self.kind != "protokv" or far == 0:
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
        """The preset that this is, whatever its seed; else the kind if all else is default, else "custom"."""
        unseeded = replace(self, seed=0)
        for preset in PRESETS:
            if unseeded == MemoryConfig.preset(preset, self.budget):
                return preset
        return self.kind if unseeded == MemoryConfig(kind=self.kind, budget=self.budget) else "custom"

    @classmethod
    def paper(cls, budget: int) -> MemoryConfig:
        """The paper's table to the letter."""
        return cls(budget=budget)

    @classmethod
    def durable(cls, budget: int) -> MemoryConfig:
        """What keeps evidence longest by our own measurements: the continuity rule, S = 1, no idle decay.

        Many small prototypes keep more of what is distinct than few that are shown eight times, and a prototype
        that is not seen again is the very evidence a late question is about, so age deletes nothing. Merging stays:
        two centres closer than its thresholds say one thing twice, and the slot that it frees is opened by the next
        evicted token. Recycling goes: it copies a token of the near window into that slot, which is then counted
        a second time when it leaves the window, and takes the room that an evicted token could have had. Residual
        statistics go: with S = 1 they changed nothing that we could measure, and they are most of the state's bytes.
        The figures are in `samples/README.md`.
        """
        return cls(budget=budget, pseudo_tokens=1, decay="off", recycle=False, residual=False)

    @classmethod
    def preset(cls, name: str, budget: int) -> MemoryConfig:
        """A preset by its name, "paper" or "durable".

        Raises:
            ConfigError: there is no such preset.
        """
        if name not in PRESETS:
            raise ConfigError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
        config: MemoryConfig = getattr(cls, name)(budget)
        return config

    def with_fields(self, changes: Mapping[str, Any]) -> MemoryConfig:
        """This config with some fields changed, under the same checks as `from_dict`."""
        return replace(self, **_known_fields(changes))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, one a field."""
        return asdict(self) | {"split": list(self.split)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryConfig:
        """The inverse of `to_dict`. A field that is left out has its default.

        Raises:
            ConfigError: a field is unknown, of a wrong type or out of range; the message names it.
        """
        return cls(**_known_fields(data))


PRESETS = ("paper", "durable")


def parse_budget(text: str | int) -> int:
    """Tokens from "512", "6k" or "1.5k" (thousands) or "1m" (millions).

    Raises:
        ConfigError: it is none of these, or not a whole positive number of tokens.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", str(text).strip().lower())
    tokens = Fraction(match[1]) * _UNITS[match[2]] if match else Fraction(0)
    if tokens < 1 or tokens.denominator != 1:
        raise ConfigError(
            f"budget: expected a positive number of tokens such as 512, 6k or 24k, got {str(text)!r}",
            hint="k stands for 1000 tokens, m for 1000000",
        )
    return int(tokens)


def _known_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(MemoryConfig)}
    for name in data:
        if name not in known:
            hint = f"known settings: {', '.join(sorted(known))}"
            raise ConfigError(f"{name}: there is no such memory setting", hint=hint)
    values = dict(data)
    if isinstance(values.get("split"), list):
        values["split"] = tuple(values["split"])
    return values


def _check_type(name: str, value: object, hint: Any) -> None:
    if get_origin(hint) is Literal:
        if not isinstance(value, str) or value not in get_args(hint):
            raise ConfigError(f"{name}: expected one of {', '.join(get_args(hint))}, got {value!r}")
        return
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple) or len(value) != 2 or any(type(part) is not int for part in value):
            raise ConfigError(f"{name}: expected two whole numbers, got {value!r}")
        return
    # A bool is an int to Python, never to a setting; a whole number may stand for a real one.
    accepted = (int, float) if hint is float else (hint,)
    if type(value) not in accepted:
        raise ConfigError(f"{name}: expected {hint.__name__}, got {type(value).__name__} {value!r}")


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    # Written so that NaN and infinity are refused as well.
    if not low <= value < float("inf") or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name}: expected {span}, got {value}")
