"""Loading a vision-language model by name or folder: the registry of families and `load_backbone`.

Owns the choice of device and dtype and the wording of what can go wrong. transformers is imported when a model is
loaded, not before.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protokv.errors import ConfigError, ModelError
from protokv.mini import weights_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from protokv.backbones.base import Backbone

__all__ = ["EMBEDDED", "FAMILIES", "load_backbone"]

EMBEDDED = "protokv/mini"

# model_type of the config -> module and class
FAMILIES = {
    "qwen2_vl": ("protokv.backbones.qwen_vl", "QwenVL"),
    "qwen2_5_vl": ("protokv.backbones.qwen_vl", "QwenVL"),
}
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "mps")


def load_backbone(name: str = EMBEDDED, *, device: str = "auto", dtype: str = "auto") -> Backbone:
    """Load a model. The embedded one, on a CPU, sets torch to one thread for this process.

    Args:
        name: `protokv/mini` (the embedded model), a local folder, or a hub name such as
            `Qwen/Qwen2.5-VL-7B-Instruct`.
        device: `auto` (CUDA where there is one, then MPS, then CPU), `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: `auto` is the checkpoint's own on an accelerator and float32 on a CPU.

    Raises:
        ModelError: there is no such model, a file of it is missing or damaged, its family is not supported, or it
            does not fit into memory.
        ConfigError: the device or dtype does not exist here.
    """
    import torch

    where = _device(device)
    if name == EMBEDDED and where.type == "cpu":
        # Its products are so small that waiting for a second thread costs more than it brings, and with one the same
        # input gives the same bytes whatever the number of cores.
        torch.set_num_threads(1)
    path = str(weights_folder()) if name == EMBEDDED else name
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not Path(path).is_dir():
        raise ModelError(f"there is no model folder at {path}", hint="name a folder with a config.json, or a hub name")
    with _translated(name):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        if config.model_type not in FAMILIES:
            raise ModelError(
                f"{name} is a {config.model_type} model, which is not supported",
                hint=f"supported families: {', '.join(FAMILIES)}",
            )
        module, cls = FAMILIES[config.model_type]
        family: type[Backbone] = getattr(import_module(module), cls)
        return family.load(path, name, config, dtype=_dtype(dtype, where, config), device=where)


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.split(":")[0]
    if kind not in DEVICES:
        raise ConfigError(f"there is no device {name!r}", hint=f"use one of {', '.join(DEVICES)} or cuda:N")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[kind]
    if not available:
        raise ConfigError(f"device {name} is not available on this machine", hint="use --device auto or cpu")
    return torch.device(name)


def _dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    import torch

    if name not in DTYPES:
        raise ConfigError(f"there is no dtype {name!r}", hint=f"use one of {', '.join(DTYPES)}")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else (config.dtype or torch.bfloat16)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Errors of transformers and torch as one clear line each; their progress bars and advice stay silent."""
    import torch
    from safetensors import SafetensorError
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit into memory", hint="use --dtype bfloat16 or a smaller model") from error
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot load the model {name}: {reason}",
            hint="check the name or folder, and that this machine can reach or has cached the model",
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
