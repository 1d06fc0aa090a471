"""Answers that are JSON: which tokens may come next, so that the text fits a schema.

llguidance does the grammar (https://github.com/guidance-ai/llguidance); it is an extra.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.errors import ConfigError, escape_text


class JsonGuide:
    """Allows the tokens of one answer that fits a schema."""

    def __init__(self, backbone: Backbone, schema: str) -> None:
        """Begin an answer. ConfigError: llguidance is missing or does not know the schema, or the
        model cannot spell JSON.
        """
        try:
            from llguidance import LLMatcher

            grammar = LLMatcher.grammar_from_json_schema(schema)
            self._matcher: Any = LLMatcher(_read_tokenizer(backbone), grammar, log_level=0)
            why = self._matcher.get_error()
        except ImportError:
            why = "llguidance is not installed"
        except ValueError as error:
            why = str(error)
        _check(why)

    def mask(self, logits: Tensor) -> Tensor:
        """Return logits `[vocabulary]` of the tokens that may come next; those of others are
        -inf.
        """
        found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        allowed[: len(found)] = found[: len(logits)] > 0
        return logits.masked_fill(~allowed.to(logits.device), -math.inf)

    def take(self, token: int) -> None:
        """Go on behind a token. ConfigError: the schema is too complex, or no token goes on."""
        self._matcher.consume_token(token)
        _check(self._matcher.get_error())


def _check(why: str) -> None:
    if why:
        raise ConfigError(
            f"such JSON cannot be written: {escape_text(why.partition(chr(10))[0], 200)}",
            hint="pip install 'protokv[json]', or choose among some answers",
        )


@lru_cache(maxsize=1)
def _read_tokenizer(backbone: Backbone) -> Any:
    """Return the tokenizer of a model as llguidance has it, which takes a second to make."""
    from llguidance import LLTokenizer

    spelled = backbone.spell_tokenizer()
    if not spelled:
        raise ValueError("the model knows words alone")
    return LLTokenizer(spelled, eos_token=sorted(backbone.stop_ids))
