"""Choose the next token, by penalties, greedily or by draw, and turn tokens into text as they come.
Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from protokv.errors import ConfigError

FinishReason = Literal["stop", "length", "repetition"]

MOST_NEW_TOKENS = 16_384  # room for a whole answer may be allocated before its first token


class TokenLogprob(NamedTuple):
    """A token, and its log probability in nats before penalties and temperature."""

    id: int
    log_probability: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an answer is generated; by default greedily. The words are those of transformers'
    `GenerationConfig`.

    ConfigError: a value is out of its range.

    Attributes:
        max_new_tokens: the most tokens of an answer.
        temperature: 0 takes the likeliest token; above 0 the logits are divided by it and a token
            is drawn.
        top_p: draw from the smallest set of likeliest tokens that holds this share of the
            probability.
        top_k: draw from this many likeliest tokens, before `top_p`; 0: from all.
        repetition_penalty: makes tokens of the prompt's text and of the answer so far less likely:
            their positive logits are divided by it, and negative ones multiplied.
        seed: of the draw; the same seed gives the same answer on the same device.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens of the answer so
            far: once, and as often as they are there, as OpenAI's interface has it.
        stop: the answer ends before the first of these texts.
        top_logprobs: the answer says the chances of its tokens and of so many likeliest ones; None:
            it does not.
        choices: the answer is the likeliest of these texts (`Session.choose`), and nothing is
            drawn; empty: any text.
        schema: the answer is JSON that fits this JSON schema; empty: any text.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    choices: tuple[str, ...] = ()
    schema: str = ""

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": (
                1 <= self.max_new_tokens <= MOST_NEW_TOKENS,
                f"1 to {MOST_NEW_TOKENS}",
            ),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "a share above 0, at most 1"),
            "top_k": (
                type(self.top_k) is int and self.top_k >= 0,
                "a number of tokens, or 0 for all",
            ),
            "repetition_penalty": (0 < self.repetition_penalty < inf, "1 (none) or more"),
        }
        for name, (fits, wanted) in checks.items():
            if not fits:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint=f"use {wanted}")
        if len(self.choices) == 1:
            raise ConfigError("a single choice is none", hint="give two or more")


_MOST_PERIOD = 32
_LEAST_REPEATS = 8
_LEAST_REPEATED = 32


def is_looping(ids: Sequence[int]) -> bool:
    """Return whether ids end in one group of tokens again and again, as greedy decoding does when
    it is stuck.

    The group has at most `_MOST_PERIOD` tokens and stands there `_LEAST_REPEATS` times, for
    `_LEAST_REPEATED` tokens: longer than laughter, and longer than the line below the head of a
    table.
    """
    for period in range(1, _MOST_PERIOD + 1):
        n = max(period * _LEAST_REPEATS, _LEAST_REPEATED)
        if n > len(ids):
            break
        if ids[-n:-period] == ids[period - n :]:
            return True
    return False


class TokenGuide(Protocol):
    """Says which tokens may come next."""

    def mask(self, logits: Tensor) -> Tensor:
        """Return logits `[vocabulary]`, -inf where a token may not come."""

    def take(self, token: int) -> None:
        """Go on behind a token."""


class TokenSampler:
    """Chooses one token after another for one answer, without waiting for the device."""

    def __init__(
        self,
        decoding: Decoding,
        device: torch.device,
        prompt: Sequence[int] = (),
        guide: TokenGuide | None = None,
    ) -> None:
        """Seed a generator for this answer alone, so that asking changes no other random state.

        `prompt` has the ids in front of the answer, for penalties; a negative one stands for what
        is no token. A `guide` allows some tokens alone, and waits for the device.
        """
        self._guide = guide
        self._decoding = decoding
        self._generator = torch.Generator(device=device).manual_seed(decoding.seed)
        self._ids: Tensor | None = None
        if decoding.repetition_penalty != 1:
            ids = [one for one in prompt if one >= 0]
            self._ids = torch.tensor(ids, dtype=torch.int64, device=device)
        self._counts: Tensor | None = None
        self._chances: list[tuple[Tensor, Tensor]] = []

    def __call__(self, logits: Tensor) -> Tensor:
        """Return a token id `[1]` int64 for logits `[vocabulary]` float32, on their device."""
        decoding = self._decoding
        shown = logits
        if self._ids is not None:
            shown = penalise_repetition(shown, self._ids, decoding.repetition_penalty)
        if decoding.presence_penalty or decoding.frequency_penalty:
            counts = self._counts = (
                torch.zeros_like(logits) if self._counts is None else self._counts
            )
            shown = (
                shown
                - decoding.presence_penalty * (counts > 0)
                - decoding.frequency_penalty * counts
            )
        chosen = self._choose(shown if self._guide is None else self._guide.mask(shown))
        if self._guide is not None:
            self._guide.take(int(chosen))
        if self._counts is not None:
            self._counts[chosen] += 1
        if self._ids is not None:
            self._ids = torch.cat((self._ids, chosen))
        likely = logits.log_softmax(-1)
        wanted = min(decoding.top_logprobs or 0, len(likely))
        ids = torch.cat((chosen, likely.topk(wanted).indices)) if wanted else chosen
        self._chances.append((ids, likely[ids]))
        return chosen

    @staticmethod
    def fetch(token: Tensor) -> int:
        """Return the id of a chosen token `[1]`. This is the only wait for the device per generated
        token.
        """
        return int(token)

    def mean_logprob(self) -> float:
        """Return the mean log probability of the chosen tokens; it does not depend on
        `Decoding`.
        """
        return float(torch.stack([chances[0] for _, chances in self._chances]).mean())

    def read_chances(self) -> list[list[TokenLogprob]]:
        """Return the chances at each token: first of the chosen one, then of the `top_logprobs`
        likeliest.
        """
        read = ((ids.tolist(), chances.tolist()) for ids, chances in self._chances)
        return [[TokenLogprob(*one) for one in zip(*both, strict=True)] for both in read]

    def _choose(self, logits: Tensor) -> Tensor:
        temperature = self._decoding.temperature
        top_k = self._decoding.top_k
        top_p = self._decoding.top_p
        if temperature == 0:
            return logits.argmax(0, keepdim=True)
        ordered, ids = (logits / temperature).softmax(-1).sort(descending=True)
        if top_k:
            ordered[top_k:] = 0
            ordered /= ordered.sum()
        # A token stays if the likelier tokens together hold less than top_p, so the likeliest
        # always stays.
        ordered.masked_fill_(ordered.cumsum(0) - ordered >= top_p, 0)
        # The largest of p / e with e exponential is drawn with probability p. torch.multinomial
        # does the same, but waits for the device to check the probabilities.
        drawn = (
            ordered / torch.empty_like(ordered).exponential_(generator=self._generator)
        ).argmax(0, keepdim=True)
        return ids[drawn]


def penalise_repetition(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Return logits `[vocabulary]`, those of tokens in `ids` `[n]` less likely by a penalty."""
    known = logits[ids]
    return logits.scatter(0, ids, torch.where(known < 0, known * penalty, known / penalty))


class Detokenizer:
    """Turns a growing list of ids into pieces of text, until one of the stops has come
    (`stopped`).
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        """Start with no ids; `decode` is the backbone's, and the text ends before the first text of
        `stop`.
        """
        self._decode = decode
        self._stop = stop
        self.stopped = False
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """Return the text that this token completes; it may be empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        # An incomplete character waits for its rest.
        if text.endswith("�"):
            return ""
        # So does the beginning of a stop.
        begun = [n for one in self._stop for n in range(1, len(one)) if text.endswith(one[:n])]
        return self._advance(text, max(begun, default=0))

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._advance(self._decode(self._ids)) if self._ids and not self.stopped else ""

    def _advance(self, text: str, held: int = 0) -> str:
        end = min((at for one in self._stop if (at := text.find(one)) >= 0), default=-1)
        self.stopped = end >= 0
        end = end if self.stopped else len(text) - held
        piece = text[self._shown : end]
        self._shown = max(end, self._shown)
        return piece
