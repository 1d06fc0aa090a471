"""The network of the embedded model: Qwen2.5-VL's vision tower and language model, in plain torch.

transformers runs the same weights, and the tests compare with it; but importing it takes longer
than an answer of this model, and its wrappers take longer than the arithmetic of a step. Knows no
memories and no files. Source: Qwen2.5-VL Technical Report, https://arxiv.org/abs/2502.13923, as
transformers implements it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from protokv.core.attention import TokenCache
from protokv.core.rotary import Angles, rotate
from protokv.core.step import Grid
from protokv.core.tensors import TensorDict, Tensors
from protokv.texts import JsonRecord

_EPSILON = 1e-6


class MiniVisionTower:
    """Patches to visual tokens, each step by itself."""

    def __init__(self, config: JsonRecord, weights: Tensors) -> None:
        """Take the `vision_config` of a checkpoint and its weights, named without `visual.`."""
        self._heads: int = config["num_heads"]
        self._merge: int = config["spatial_merge_size"]
        self._theta: float = config["rope_parameters"]["rope_theta"]
        # The stride of the convolution is its kernel, so it is one product.
        self._projection = weights["patch_embed.proj.weight"].flatten(1)
        self._blocks = [
            select_weights_by_prefix(weights, f"blocks.{i}.") for i in range(config["depth"])
        ]
        for block in self._blocks:
            _join(block, "mlp.in", ["mlp.gate_proj", "mlp.up_proj"])
        self._merger = select_weights_by_prefix(weights, "merger.")

    def __call__(self, patches: Tensor, grid: Grid) -> Tensor:
        """Return visual tokens `[B, n, E]` of patches `[B, n * merge**2, pixels]` in their order,
        of one dtype.
        """
        steps, n = patches.shape[:2]
        x = functional.linear(patches, self._projection)
        size = x.shape[-1] // self._heads
        cos, sin = _axial_angles(grid, self._merge, size, self._theta, x.device)
        for w in self._blocks:
            qkv = _linear(_norm(x, w["norm1.weight"]), w, "attn.qkv").view(
                steps, n, 3, self._heads, size
            )
            rotated = rotate(qkv[:, :, :2].float(), (cos, sin)).to(x.dtype)
            query = rotated[:, :, 0]
            key = rotated[:, :, 1]
            value = qkv[:, :, 2]
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            mixed = functional.scaled_dot_product_attention(query, key, value, scale=size**-0.5)
            x = x + _linear(mixed.transpose(1, 2).reshape(steps, n, -1), w, "attn.proj")
            x = x + _gated(_norm(x, w["norm2.weight"]), w)
        w = self._merger
        cells = _norm(x, w["ln_q.weight"]).view(steps, grid[0] * grid[1], -1)
        return _linear(functional.gelu(_linear(cells, w, "mlp.0")), w, "mlp.2")


class MiniLanguageModel:
    """Embeddings to hidden states and logits, over a `TokenCache`."""

    def __init__(self, config: JsonRecord, weights: Tensors) -> None:
        """Take the `text_config` of a checkpoint and its weights, named without `model.`."""
        self.head_size: int = config["hidden_size"] // config["num_attention_heads"]
        self._query_heads: int = config["num_attention_heads"]
        self._heads: int = config["num_key_value_heads"]
        self.embedding = weights["embed_tokens.weight"]
        self._last_norm = weights["norm.weight"]
        self._layers = [
            select_weights_by_prefix(weights, f"layers.{i}.")
            for i in range(config["num_hidden_layers"])
        ]
        for layer in self._layers:
            _join(layer, "qkv", [f"self_attn.{name}_proj" for name in "qkv"])
            _join(layer, "mlp.in", ["mlp.gate_proj", "mlp.up_proj"])
        rope = config["rope_parameters"]
        half = torch.arange(0, self.head_size, 2, dtype=torch.float)
        self._frequency = (1.0 / (rope["rope_theta"] ** (half / self.head_size))).to(
            self.embedding.device
        )
        component = [i for i, n in enumerate(rope["mrope_section"]) for _ in range(n)]
        self._component = torch.tensor(component, device=self.embedding.device)

    def angles(self, positions: Tensor) -> Angles:
        """Return cos and sin `[..., D]` float32 of positions `[..., 3]`; each section has its own
        component.
        """
        component = self._component.to(positions.device)
        frequency = self._frequency.to(positions.device)
        angle = positions.float().index_select(-1, component) * frequency
        cos = angle.cos()
        sin = angle.sin()
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def __call__(self, embeddings: Tensor, positions: Tensor, cache: TokenCache) -> Tensor:
        """Return the final hidden states `[T, E]` of embeddings `[T, E]` at positions `[T, 3]`."""
        x = embeddings
        T = len(embeddings)
        D = self.head_size
        both = self._query_heads + self._heads
        cos, sin = (part.to(x.dtype) for part in self.angles(positions))
        for layer, w in enumerate(self._layers):
            qkv = (
                _linear(_norm(x, w["input_layernorm.weight"]), w, "qkv")
                .view(T, -1, D)
                .transpose(0, 1)
            )
            rotated = rotate(qkv[:both], (cos, sin))
            query = rotated[: self._query_heads]
            mixed = cache.attend(layer, query, (rotated[self._query_heads :], qkv[both:]), D**-0.5)
            x = x + functional.linear(
                mixed.transpose(0, 1).reshape(T, -1), w["self_attn.o_proj.weight"]
            )
            x = x + _gated(_norm(x, w["post_attention_layernorm.weight"]), w)
        return _norm(x, self._last_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[..., vocabulary]` float32; the head is the embedding."""
        return functional.linear(hidden, self.embedding).float()


def select_weights_by_prefix(weights: Tensors, prefix: str) -> TensorDict:
    """Return the weights whose names start with a prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def _join(weights: TensorDict, name: str, parts: Sequence[str]) -> None:
    """Join weights of several products over the same input into one."""
    for kind in ("weight", "bias"):
        if f"{parts[0]}.{kind}" in weights:
            weights[f"{name}.{kind}"] = torch.cat([weights.pop(f"{part}.{kind}") for part in parts])


def _linear(x: Tensor, weights: Tensors, name: str) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _gated(x: Tensor, weights: Tensors) -> Tensor:
    gate, up = _linear(x, weights, "mlp.in").chunk(2, -1)
    return _linear(functional.silu(gate) * up, weights, "mlp.down_proj")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], eps=_EPSILON).to(x.dtype).mul_(weight)


@lru_cache(maxsize=4)
def _axial_angles(grid: Grid, merge: int, size: int, theta: float, device: torch.device) -> Angles:
    """Return cos and sin `[patches, 1, 1, size]` float32 in token order; half of the pairs rotate
    by row.
    """
    cells = torch.cartesian_prod(*(torch.arange(n) for n in (*grid, merge, merge)))
    places = torch.stack([cells[:, 0] * merge + cells[:, 2], cells[:, 1] * merge + cells[:, 3]], -1)
    half = size // 2
    frequency = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float) / half))
    angle = (places[..., None].float() * frequency).flatten(1)[:, None, None]
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat((cos, cos), -1).to(device), torch.cat((sin, sin), -1).to(device)
