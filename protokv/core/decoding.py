"""Choosing the next token, and turning tokens into text as they come.

Owns greedy and nucleus sampling and the holding back of half-finished characters. Knows logits and ids, not models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.errors import ConfigError

# Room for a whole answer is set aside before its first token.
MOST_NEW_TOKENS = 16_384


def log_probability(logits: Tensor, token: Tensor) -> Tensor:
    """What the model gave a token, `[1]` float32 on its device: log softmax of its logits, whatever it was drawn by.

    Args:
        logits: `[vocabulary]` float32.
        token: `[1]` int64.
    """
    return logits.log_softmax(-1)[token]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an answer is generated.

    Attributes:
        max_new_tokens: tokens of an answer at the most.
        temperature: 0 takes the likeliest token; above 0 the logits are divided by it and a token is drawn.
        top_p: draw from the smallest set of likeliest tokens that holds this share of the probability.
        seed: of the draw; the same seed gives the same answer on the same device.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.max_new_tokens <= MOST_NEW_TOKENS:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}", hint=f"use 1 to {MOST_NEW_TOKENS}")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature is {self.temperature}", hint="use 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}", hint="use a share above 0, at most 1")


class Chooser:
    """Draws one token after another for one answer."""

    def __init__(self, decoding: Decoding, device: torch.device) -> None:
        """Start the answer's own generator, so that asking leaves every other random state alone."""
        self._decoding = decoding
        self._generator = torch.Generator(device=device).manual_seed(decoding.seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """One token id `[1]` int64 from `[vocabulary]` float32, on its device; nothing waits for it."""
        if self._decoding.temperature == 0:
            return logits.argmax(0, keepdim=True)
        probabilities = (logits / self._decoding.temperature).softmax(-1)
        ordered, ids = probabilities.sort(descending=True)
        # A token stays if the tokens likelier than it do not yet hold top_p: the likeliest always stays.
        ordered.masked_fill_(ordered.cumsum(0) - ordered >= self._decoding.top_p, 0)
        # The largest of p / e with e exponential is drawn with probability p. torch.multinomial does the same, but
        # first asks the device whether the probabilities are sound.
        drawn = (ordered / torch.empty_like(ordered).exponential_(generator=self._generator)).argmax(0, keepdim=True)
        return ids[drawn]


def read_token(token: Tensor) -> int:
    """The id of a chosen token `[1]`: the one wait for the device that a generated token costs."""
    return int(token)


class TextStream:
    """Pieces of text from a growing list of ids; a character cut in the middle waits for its rest."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Use `decode`, the backbone's."""
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token completes, possibly empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("�"):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """What was held back."""
        return self._advance(self._decode(self._ids)) if self._ids else ""

    def _advance(self, text: str) -> str:
        piece, self._shown = text[self._shown :], len(text)
        return piece
