"""The part of OpenAI's chat completions that a state can answer: requests, checked field by field, and replies.

A state keeps no conversation: each request brings all of it. Fields that a state cannot serve are refused by name. See https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from protokv.core.backbone import Turn
from protokv.core.decoding import Decoding
from protokv.core.session import Answer
from protokv.errors import ConfigError
from protokv.texts import admit_question, find_broken, read_json

MOST_TOKENS = 1024
_TEXT_PARTS = ("text", "input_text", "output_text")

# Fields that a state cannot serve, with the values that ask for nothing.
_UNUSED: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "tools": (None, []),
    "functions": (None, []),
    "stop": (None, []),
    "logprobs": (None, False),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}


@dataclass(frozen=True, slots=True)
class Request:
    """A question to a state, the turns of the conversation before it, and the system prompt; see `Session.stream`."""

    model: str
    question: str
    turns: Sequence[Turn]
    system: str | None
    decoding: Decoding
    stream: bool
    usage: bool = False  # end the stream with the number of tokens
    anyway: bool = False  # answer even if the model cannot make sense of the video; not in OpenAI's interface
    evidence: bool = False  # say which moments of the stream the answer stands on; not in OpenAI's interface


def parse(body: bytes, published: Decoding) -> Request:
    """Return the request in a body; `published` is how the model chooses tokens where the request does not say.

    Raises:
        ConfigError: a state cannot answer it; the field is named.
    """
    data = read_object(body, _UNUSED)
    stream_options = data.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise ConfigError("stream_options: expected an object")
    question, turns, system = conversation_of(data.get("messages"), "messages")
    return Request(
        model=data["model"],
        question=question,
        turns=turns,
        system=system,
        decoding=decoding_of(data, published, "max_completion_tokens", "max_tokens"),
        stream=data.get("stream") is True,
        usage=stream_options.get("include_usage") is True,
        anyway=data.get("anyway") is True,
        evidence=data.get("evidence") is True,
    )


def read_object(body: bytes, unused: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the JSON object in a body, which names a model.

    Args:
        body: of the request.
        unused: fields that a state cannot serve, with the values that ask for nothing.

    Raises:
        ConfigError: it is something else, or asks for what a state cannot do.
    """
    try:
        data = read_json(body)
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError("the body is not a JSON object")
    for name, allowed in unused.items():
        if data.get(name) not in allowed:
            raise ConfigError(f"{name}: a state cannot do that")
    if not isinstance(data.get("model"), str) or find_broken(data["model"]) is not None:
        raise ConfigError("model: expected the name of a state")
    return data


def decoding_of(data: Mapping[str, Any], published: Decoding, *most: str) -> Decoding:
    """Return how to choose tokens; `most` are the names of the field with the most of them. ConfigError."""
    return replace(
        published,
        max_new_tokens=int(_number(data, most, min(published.max_new_tokens, MOST_TOKENS), 1, MOST_TOKENS)),
        temperature=_number(data, ("temperature",), published.temperature, 0.0, 2.0),
        top_p=_number(data, ("top_p",), published.top_p, 1e-6, 1.0),
        seed=int(_number(data, ("seed",), 0, 0, 2**53)),
    )


def conversation_of(messages: object, field: str) -> tuple[str, list[Turn], str | None]:
    """Return the question, the turns before it, and the system prompt. ConfigError, naming the field.

    Messages of one role in a row are one text. What the assistant said before the first question is left out.
    """
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ConfigError(f"{field}: expected a list of objects")
    if not any(one.get("role") == "user" for one in messages):
        raise ConfigError(f"{field}: there is none with the role user")
    system, said = list[str](), list[tuple[str, str]]()
    for one in messages:
        role, text = one.get("role"), _text_of(one.get("content"), field)
        if role in ("system", "developer"):
            system.append(text)
        elif role not in ("user", "assistant"):
            raise ConfigError(f"{field}: a role is none of user, assistant, system and developer")
        elif said and said[-1][0] == role:
            said[-1] = (role, f"{said[-1][1]}\n\n{text}")
        elif said or role == "user":
            said.append((role, text))
    role, question = said.pop()
    if role != "user":
        raise ConfigError(f"{field}: the last one must have the role user")
    admit_question(question, f"{field}: the question")
    texts = [text for _, text in said]
    return question, list(zip(texts[::2], texts[1::2], strict=True)), "\n\n".join(filter(str.strip, system)) or None


def _text_of(content: object, field: str) -> str:
    """Return the text of a message, whose parts stand one below the other."""
    if isinstance(content, list):
        if not all(isinstance(one, dict) and one.get("type") in _TEXT_PARTS for one in content):
            raise ConfigError(f"{field}: a state answers questions in text and takes no pictures")
        texts = [one.get("text") for one in content]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{field}: a part has no text")
        return "\n".join(texts)
    return content if isinstance(content, str) else ""


def _number(data: Mapping[str, Any], names: tuple[str, ...], default: float, least: float, most: float) -> float:
    name = next((one for one in names if data.get(one) is not None), None)
    value = default if name is None else data[name]
    if type(value) not in (int, float) or not least <= value <= most:
        raise ConfigError(f"{name}: expected a number from {least:g} to {most:g}")
    return float(value)


class Reply:
    """An answer as OpenAI's chat completions have it: whole, or the events of a stream."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the whole answer."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason(answer)}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(answer),
            **extras(answer),
        }

    def begin(self) -> str:
        """Return the events before the first piece."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> str:
        """Return the event of a piece."""
        return self._chunk({"content": text})

    def end(self, answer: Answer) -> str:
        """Return the events after the last piece."""
        last = self._chunk({}, self._reason(answer), **extras(answer))
        if self._request.usage:
            last += event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answer)})
        return last + "data: [DONE]\n\n"

    def fail(self, error: Mapping[str, Any]) -> str:
        """Return the event of an error in the middle of an answer."""
        return event({"error": error})

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **more})

    @staticmethod
    def _reason(answer: Answer) -> str:
        return "stop" if answer.finish_reason == "stop" else "length"


def extras(answer: Answer) -> dict[str, Any]:
    """Return what is not in OpenAI's interface.

    The stream time of the state; why the answer ended, since "repetition" has no word there; how many earlier turns the
    model read; whether the answer means nothing; and the evidence, if it was wanted.
    """
    found: dict[str, Any] = {
        "stream_time_s": answer.stream_time_s,
        "ended": answer.finish_reason,
        "turns": answer.turns,
    }
    if answer.beyond_model:
        found["beyond_model"] = True
    if answer.evidence is not None:
        found["evidence"] = [asdict(moment) for moment in answer.evidence.moments]
        found["faint"] = answer.evidence.faint
    return found


def event(data: Mapping[str, Any]) -> str:
    """Return a server-sent event; one with a type is named by it."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.context_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.context_tokens + answer.tokens,
    }
