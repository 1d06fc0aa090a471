"""Where and in which dtype a model is loaded: device, dtype, a map over devices, quantisation.

Owns what these names mean, and the errors for those that are unknown or contradict each other. Loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from protokv.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "mps")
DEVICE_MAPS = ("auto", "balanced")
QUANTIZATIONS = ("4bit", "8bit")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a family loads its model.

    Attributes:
        dtype: of weights, keys and values; of a quantised model what it computes in.
        device: of the model, or of the parts that `device_map` does not place.
        device_map: how layers are spread over several devices; None: they are not.
        quantization: of the weights, by bitsandbytes; None: none.
    """

    dtype: torch.dtype
    device: torch.device
    device_map: str | None = None
    quantization: str | None = None

    @property
    def dtype_name(self) -> str:
        """As a state names it: `bfloat16`, or `bfloat16+4bit`, since quantised weights give other keys and values."""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}+{self.quantization}" if self.quantization else name


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A placement as a user writes it, with every name checked; see `load_backbone`."""

    device: torch.device
    dtype: str
    device_map: str | None
    quantization: str | None

    @classmethod
    def of(cls, *, device: str, dtype: str, device_map: str | None, quantization: str | None) -> PlacementRequest:
        """Check the names.

        Raises:
            ConfigError: one of them does not exist here, or two contradict each other.
        """
        plain, _, in_dtype = dtype.partition("+")
        if in_dtype and quantization not in (None, in_dtype):
            raise ConfigError(f"dtype {dtype} and quantization {quantization} contradict each other")
        quantization = in_dtype or quantization
        if plain not in DTYPES or (in_dtype and plain == "auto"):
            raise ConfigError(f"there is no dtype {dtype!r}", hint=f"use one of {', '.join(DTYPES)}")
        if quantization not in (None, *QUANTIZATIONS):
            raise ConfigError(
                f"there is no quantization {quantization!r}", hint=f"use one of {', '.join(QUANTIZATIONS)}"
            )
        if device_map not in (None, *DEVICE_MAPS):
            raise ConfigError(f"there is no device map {device_map!r}", hint=f"use one of {', '.join(DEVICE_MAPS)}")
        if device_map is not None and device != "auto":
            raise ConfigError(
                f"device map {device_map} chooses the devices, and so does device {device}", hint="use one of the two"
            )
        return cls(_device(device), plain, device_map, quantization)

    def placement(self, config: Any) -> Placement:
        """The placement of a model with this transformers config."""
        dtype = getattr(torch, self.dtype) if self.dtype != "auto" else _own_dtype(config, self.device)
        return Placement(dtype, self.device, self.device_map, self.quantization)


def _own_dtype(config: Any, device: torch.device) -> torch.dtype:
    dtype: torch.dtype = torch.float32 if device.type == "cpu" else (config.dtype or torch.bfloat16)
    return dtype


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, colon, number = name.partition(":")
    if kind not in DEVICES[1:] or (colon and not (kind == "cuda" and number.isdecimal())):
        raise ConfigError(f"there is no device {name!r}", hint=f"use one of {', '.join(DEVICES)} or cuda:N")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[kind]
    if not available:
        raise ConfigError(f"device {name} is not available on this machine", hint="use --device auto or cpu")
    if number and int(number) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} is not available: this machine has {torch.cuda.device_count()}, counted from cuda:0"
        )
    return torch.device(name)
