"""The embedded model as a backbone, without transformers: `protokv.mini.network` behind the
interface.

`QwenVL` runs the same folder with transformers, which a model that is spread over devices or
quantised needs, and the tests hold the two together: all is equal, the output of the vision tower
up to the order of sums.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from protokv.backbones.chat import refuse_control_tokens
from protokv.backbones.files import digest_weights, read_model_file
from protokv.backbones.loading import PackagedModel, Placement, PlacementOptions
from protokv.backbones.pixels import GridBackbone, PreprocessorConfig
from protokv.core.attention import TokenCache
from protokv.core.backbone import MOST_WORD_TOKENS, BackboneIdentity, ChatTurn, PreparedStep
from protokv.core.rotary import Angles
from protokv.core.step import StepTokens
from protokv.mini.network import MiniLanguageModel, MiniVisionTower, select_weights_by_prefix
from protokv.texts import JsonObject

IDENTITY_FILE = "identity.json"
_FOLDERS = {f"protokv/mini{name}": f"weights{name}" for name in ("", "-order", "-words")}
"""`-order` has four more layers and also reads order and counts appearances; `-words` two more, and
reads words too.
"""


class MiniBackbone(GridBackbone, PackagedModel):
    """`protokv/mini`, `protokv/mini-order` and `protokv/mini-words`."""

    position_components = 3
    converses = False
    notice = "the embedded model reads drawn shapes only; other videos need --model"

    def __init__(
        self, path: Path, config: JsonObject, identity: BackboneIdentity, placement: Placement
    ) -> None:
        """Read the network and the tokenizer of a folder whose `config.json` is `config`."""
        weights = load_file(path / "model.safetensors")
        weights = {
            name: tensor.to(placement.device, placement.dtype) for name, tensor in weights.items()
        }
        text = config["text_config"]
        self._vision = MiniVisionTower(
            config["vision_config"], select_weights_by_prefix(weights, "visual.")
        )
        self._language = MiniLanguageModel(text, select_weights_by_prefix(weights, "model."))
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._pixels = PreprocessorConfig.from_files(
            read_model_file(str(path), "preprocessor_config.json")
        )
        self.identity = identity
        embedding = self._language.embedding
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.layers: int = text["num_hidden_layers"]
        self.kv_heads: int = text["num_key_value_heads"]
        self.head_size = self._language.head_size
        self.max_position = text["max_position_embeddings"]
        self.stop_ids = frozenset({text["eos_token_id"]})
        self.frames_per_step = self._pixels.temporal_patch_size
        self.default_fps = float(config["protokv_fps"])
        # The second layer by default: see `samples/studies/evidence/`.
        self.reading_layers = tuple(config.get("protokv_reading_layers", (1,)))
        self._tokens_per_second: int = config["vision_config"]["tokens_per_second"]
        self.settings = self._pixels.settings(self.default_fps)
        control = self._tokenizer.get_added_tokens_decoder()
        self._control = sorted(token.content for token in control.values())
        self._control_ids = frozenset(control)
        # The chat template's text in front of the video.
        self._prefix = self.encode("<|im_start|>user\n<|vision_start|>")

    @classmethod
    def folder(cls, name: str) -> Path:
        """Return the folder of an embedded model."""
        return Path(__file__).with_name(_FOLDERS[name])

    @classmethod
    def adjust(cls, request: PlacementOptions) -> PlacementOptions:
        """Use one thread and float32 on a CPU: a second does not pay off, and bytes are the same on
        any processor.
        """
        if request.device.type != "cpu":
            return request
        torch.set_num_threads(1)
        return replace(request, dtype="float32") if request.dtype == "auto" else request

    @classmethod
    def load(cls, path: str, name: str, config: Any, placement: Placement) -> Self:
        """Load a folder of an embedded model; `config` is its plain `config.json`."""
        return cls(Path(path), config, cls.identify(path, name, config, placement), placement)

    @classmethod
    def identify(cls, path: str, name: str, config: Any, placement: Placement) -> BackboneIdentity:
        """Identify a folder of an embedded model."""
        return BackboneIdentity(
            name=name,
            family=config["model_type"],
            config_hash=json.loads((Path(path) / IDENTITY_FILE).read_text(encoding="utf-8"))[
                "config_hash"
            ],
            weights_digest=digest_weights(path),
            dtype=placement.dtype_name,
        )

    @property
    def prefix_ids(self) -> list[int]:
        """Return the token ids in front of the video."""
        return self._prefix

    def suffix_ids(self, question: str, turns: Sequence[ChatTurn] = ()) -> list[int]:
        """Return the token ids after the video; turns are left out, as the model was not trained on
        them.
        """
        refuse_control_tokens(question, self._control)
        return self.encode(f"<|vision_end|>{question.strip()}<|im_end|>\n<|im_start|>assistant\n")

    def words_ids(self, text: str) -> list[int]:
        """Return the token ids of subtitles between two segments of video, without unknown
        words.
        """
        ids = [token for token in self.encode(text) if token not in self._control_ids][
            :MOST_WORD_TOKENS
        ]
        return (
            [*self.encode("<|vision_end|>"), *ids, *self.encode("<|vision_start|>")] if ids else []
        )

    def decode(self, ids: list[int]) -> str:
        """Return the text of generated ids without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def unknown_words(self, question: str) -> list[str]:
        """Return the words outside the vocabulary, once each, in lower case."""
        words = self._tokenizer.pre_tokenizer.pre_tokenize_str(question.lower())
        return list(
            dict.fromkeys(word for word, _ in words if self._tokenizer.token_to_id(word) is None)
        )

    def embed_token(self, token: Tensor) -> Tensor:
        """Return `[n, E]`."""
        return torch.nn.functional.embedding(token, self._language.embedding)

    def embed_steps(
        self, steps: Sequence[PreparedStep], times_s: Sequence[float]
    ) -> list[StepTokens]:
        """Run steps of one grid through the vision tower together, others one by one."""
        if len({step.grid for step in steps}) > 1:
            return [tokens for step in steps for tokens in self.embed_steps([step], [0.0])]
        patches = torch.stack(
            [step.pixels.to(self.device, non_blocking=True) for step in steps]
        ).to(self.dtype)
        return [StepTokens(seen, steps[0].grid) for seen in self._vision(patches, steps[0].grid)]

    def rotary(self, positions: Tensor) -> Angles:
        """Return the angles of M-RoPE on the device of the positions."""
        return self._language.angles(positions)

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        cache: TokenCache,
        *,
        steps: Sequence[StepTokens] = (),
    ) -> Tensor:
        """Run `[T, E]` through the language model."""
        return self._language(embeddings, positions, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[..., vocabulary]` float32."""
        return self._language.logits(hidden)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
