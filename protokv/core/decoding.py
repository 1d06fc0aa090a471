"""Choose the next token, and turn tokens into text as they come.

Owns penalties, greedy choice and draws, and holds back characters that are not complete. Knows logits and ids, not
models. What a model was published with is `Backbone.decoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from protokv.errors import ConfigError

FinishReason = Literal["stop", "length", "repetition"]

# Room for a whole answer is allocated before its first token.
MOST_NEW_TOKENS = 16_384


def log_probability(logits: Tensor, token: Tensor) -> Tensor:
    """Return the log softmax of the logits at a token, `[1]` float32; it does not depend on `Decoding`.

    Args:
        logits: `[vocabulary]` float32.
        token: `[1]` int64.
    """
    return logits.log_softmax(-1)[token]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an answer is generated; by default greedily. The words are those of transformers' `GenerationConfig`.

    Attributes:
        max_new_tokens: the most tokens of an answer.
        temperature: 0 takes the likeliest token; above 0 the logits are divided by it and a token is drawn.
        top_p: draw from the smallest set of likeliest tokens that holds this share of the probability.
        top_k: draw from this many likeliest tokens, before `top_p`; 0: from all.
        repetition_penalty: makes tokens of the prompt's text and of the answer so far less likely: their positive
            logits are divided by it, and negative ones multiplied.
        seed: of the draw; the same seed gives the same answer on the same device.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.max_new_tokens <= MOST_NEW_TOKENS:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}", hint=f"use 1 to {MOST_NEW_TOKENS}")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature is {self.temperature}", hint="use 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}", hint="use a share above 0, at most 1")
        if type(self.top_k) is not int or self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}", hint="use a number of tokens, or 0 for all")
        if not 0 < self.repetition_penalty < inf:
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}", hint="use 1 (none) or more")


MOST_PERIOD = 32
LEAST_REPEATS = 8
LEAST_REPEATED = 32


def is_repeating(ids: Sequence[int]) -> bool:
    """Return whether ids end in one group of tokens again and again, as greedy decoding does when it is stuck.

    The group has at most `MOST_PERIOD` tokens and stands there `LEAST_REPEATS` times and for `LEAST_REPEATED` tokens:
    longer than laughter, and longer than the line below the head of a table.
    """
    for period in range(1, MOST_PERIOD + 1):
        n = max(period * LEAST_REPEATS, LEAST_REPEATED)
        if n > len(ids):
            break
        if ids[-n:-period] == ids[period - n :]:
            return True
    return False


class Chooser:
    """Chooses one token after another for one answer, without waiting for the device."""

    def __init__(self, decoding: Decoding, device: torch.device, prompt: Sequence[int] = ()) -> None:
        """Seed a generator for this answer alone, so that asking changes no other random state.

        `prompt` has the ids in front of the answer, for penalties; a negative one stands for what is no token.
        """
        self._decoding = decoding
        self._generator = torch.Generator(device=device).manual_seed(decoding.seed)
        penalises = decoding.repetition_penalty != 1
        self._ids = torch.tensor(list(prompt), dtype=torch.int64, device=device) if penalises else None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return a token id `[1]` int64 for logits `[vocabulary]` float32, on their device."""
        if self._ids is None:
            return self._choose(logits)
        chosen = self._choose(penalise(logits, self._ids, self._decoding.repetition_penalty))
        self._ids = torch.cat((self._ids, chosen))
        return chosen

    def _choose(self, logits: Tensor) -> Tensor:
        temperature, top_k, top_p = self._decoding.temperature, self._decoding.top_k, self._decoding.top_p
        if temperature == 0:
            return logits.argmax(0, keepdim=True)
        ordered, ids = (logits / temperature).softmax(-1).sort(descending=True)
        if top_k:
            ordered[top_k:] = 0
            ordered /= ordered.sum()
        # A token stays if the likelier tokens together hold less than top_p, so the likeliest always stays.
        ordered.masked_fill_(ordered.cumsum(0) - ordered >= top_p, 0)
        # The largest of p / e with e exponential is drawn with probability p. torch.multinomial does the same, but
        # waits for the device to check the probabilities.
        drawn = (ordered / torch.empty_like(ordered).exponential_(generator=self._generator)).argmax(0, keepdim=True)
        return ids[drawn]


def penalise(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Return logits `[vocabulary]`, those of tokens in `ids` `[n]` less likely by a penalty; negative ids are none."""
    # Boolean indexing would wait for the device, so what is no token goes into one slot more.
    marks = torch.zeros(len(logits) + 1, dtype=torch.bool, device=ids.device)
    marks.scatter_(0, torch.where(ids < 0, len(logits), ids), True)
    return torch.where(marks[:-1], torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def read_token(token: Tensor) -> int:
    """Return the id of a chosen token `[1]`. This is the only wait for the device per generated token."""
    return int(token)


class TextStream:
    """Turns a growing list of ids into pieces of text; an incomplete character waits for its rest."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Start with no ids; `decode` is the backbone's."""
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """Return the text that this token completes; it may be empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("�"):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._advance(self._decode(self._ids)) if self._ids else ""

    def _advance(self, text: str) -> str:
        piece, self._shown = text[self._shown :], len(text)
        return piece
