"""Answers in JSON: a schema that has few answers is a choice among them.

They are told apart by one value, which the model chooses as it chooses among words. An answer to
any other schema is written by its grammar. See https://json-schema.org/draft/2020-12.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice, product
from typing import Any

from protokv.errors import ConfigError

_MOST_ANSWERS = 64
_DEEPEST = 16
_NOTES = {"type", "title", "description", "default", "examples", "$schema"}
# How a model says values that are no texts.
_WORDS = {"true": "yes", "false": "no", "null": "none"}


def read_response_format(form: object) -> tuple[dict[str, str], str]:
    """Return what a `response_format` of OpenAI asks for: answers as JSON, by the word that the
    model chooses, or a schema; both empty for text.

    ConfigError: it is no such format.
    """
    if form in (None, {"type": "text"}):
        return {}, ""
    if form == {"type": "json_object"}:
        return {}, '{"type": "object"}'
    asked = form.get("json_schema") if isinstance(form, dict) else None
    schema = asked.get("schema") if isinstance(asked, dict) else None
    if not isinstance(schema, dict):
        raise ConfigError(
            'response_format: expected {"type": "text"}, {"type": "json_object"}, or "json_schema" '
            "with a schema"
        )
    values = _list_values(schema)
    if values and 1 < len(values) <= _MOST_ANSWERS:
        texts = [json.dumps(one, ensure_ascii=False) for one in values]
        for words in zip(*map(_list_words, values), strict=False):
            if len(set(words)) == len(texts):
                return dict(zip(words, texts, strict=True)), ""
    return {}, json.dumps(schema)


def _list_values(schema: object, depth: int = 0) -> list[Any] | None:
    """Return all values of a schema, at most one too many; None: it leaves others."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return None
    kind = schema.get("type")
    said = schema.keys() - _NOTES
    if said in ({"enum"}, {"const"}):
        found = schema.get("enum", [schema.get("const")])
        return found if isinstance(found, list) else None
    if kind in ("boolean", "null") and not said:
        return [False, True] if kind == "boolean" else [None]
    fields = schema.get("properties")
    if kind != "object" or not isinstance(fields, dict):
        return None
    if said - {"properties", "required", "additionalProperties"}:
        return None
    each = [_list_values(one, depth + 1) for one in fields.values()]
    known = [one for one in each if one is not None]
    if len(known) < len(each):
        return None
    every = islice(product(*known), _MOST_ANSWERS + 1)
    return [dict(zip(fields, values, strict=True)) for values in every]


def _list_words(value: object) -> Iterable[str]:
    """Yield how a model says each value without parts in a value, in order."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _list_words(one)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
        yield text if isinstance(value, str) else _WORDS.get(text, text)
