"""Answers that are written by the grammar of a schema are JSON that fits it, whatever the model
would say.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from protokv.core.decoding import Decoding
from protokv.errors import ConfigError
from protokv.memories import DurableConfig
from protokv.stream.guide import JsonGuide
from protokv.stream.session import Session
from protokv.texts import JsonObject
from tests.conftest import random_frames
from tests.mock_backbone import MockBackbone

pytest.importorskip("llguidance")

LETTERS = ["<end>", *'{}[]":,-.0123456789aefinlrstuxyĠ', "true", "false"]


class Spelling(MockBackbone):
    """A model that says any letter; a seed draws which."""

    stop_ids = frozenset({0})
    seed = 0

    def spell_tokenizer(self) -> str:
        tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate(LETTERS)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer.to_str()

    def embed_text(self, ids: list[int]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(ids) % 4, 4).float()

    def decode(self, ids: list[int]) -> str:
        return "".join(LETTERS[i] for i in ids if i).replace("Ġ", " ")

    def logits(self, hidden: Tensor) -> Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        # More letters than the tokenizer has.
        return torch.randn(*hidden.shape[:-1], len(LETTERS) + 5, generator=generator)


FITTING: JsonObject = {
    "two values": (
        {"a": {"type": "boolean"}, "e": {"enum": ["fine", "rest"]}},
        lambda one: isinstance(one["a"], bool) and one["e"] in ("fine", "rest"),
    ),
    "a text": (
        {"r": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "maximum": 99}},
        lambda one: len(one["r"]) <= 6 and isinstance(one["n"], int) and one["n"] <= 99,
    ),
}


def write(backbone: Spelling, schema: Any, seeds: Sequence[int]) -> list[Any]:
    session = Session.start(backbone, DurableConfig(budget=40))
    session.watch(random_frames(1, 2, 8, 9))
    found = []
    for seed in seeds:
        backbone.seed = 1000 * seed
        decoding = Decoding(max_new_tokens=200, schema=json.dumps(schema))
        answer = session.ask("what is it", decoding)
        assert answer.finish_reason == "stop"
        found.append(json.loads(answer.text))
    return found


@pytest.mark.parametrize("name", FITTING)
def test_an_answer_fits_its_schema(name: str) -> None:
    fields, fits = FITTING[name]
    schema = {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
    }
    found = write(Spelling(), schema, range(12))
    assert all(one.keys() == fields.keys() and fits(one) for one in found)
    assert len({json.dumps(one) for one in found}) > 1


def test_schemas_and_models_that_cannot_be_are_refused_in_a_line() -> None:
    for backbone, schema in (
        (Spelling(), '{"type": "star"}'),
        (MockBackbone(), "{}"),
    ):
        with pytest.raises(ConfigError, match="cannot be written"):
            JsonGuide(backbone, schema)
    # Its first letter is known.
    with pytest.raises(ConfigError, match="cannot be written"):
        write(Spelling(), {"enum": ["quote"]}, [0])
