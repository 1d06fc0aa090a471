"""The part of OpenAI's chat completions that a state can answer: requests, checked field by field, and replies.

A state keeps no conversation: each request brings all of it. Fields that a state cannot serve are refused by name.
See https://platform.openai.com/docs/api-reference/chat.
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

MOST_ANSWER_TOKENS = 1024

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
class ChatRequest:
    """A question to a state, the turns of the conversation before it, and the system prompt; see `Session.stream`."""

    model: str
    text: str
    turns: Sequence[Turn]
    system: str | None
    decoding: Decoding
    stream: bool
    usage: bool = False  # end the stream with the number of tokens
    evidence: bool = False  # say on which spans of the stream the answer stands; not in OpenAI's interface


def parse(body: bytes, published: Decoding) -> ChatRequest:
    """Return the request in a body; `published` is how the model chooses tokens where the request does not say.

    Raises:
        ConfigError: a state cannot answer it; the field is named.
    """
    data = _read_object(body)
    stream_options = data.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise ConfigError("stream_options: expected an object")
    question, turns, system = _read_messages(data.get("messages"))
    return ChatRequest(
        model=data["model"],
        text=question,
        turns=turns,
        system=system,
        decoding=_read_decoding(data, published),
        stream=data.get("stream") is True,
        usage=stream_options.get("include_usage") is True,
        evidence=data.get("evidence") is True,
    )


def _read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, which names a model. ConfigError if it asks for what a state cannot do."""
    try:
        data = read_json(body)
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError("the body is not a JSON object")
    for name, allowed in _UNUSED.items():
        if data.get(name) not in allowed:
            raise ConfigError(f"{name}: a state cannot do that")
    if not isinstance(data.get("model"), str) or find_broken(data["model"]) is not None:
        raise ConfigError("model: expected the name of a state")
    return data


def _read_decoding(data: Mapping[str, Any], published: Decoding) -> Decoding:
    """Return how to choose tokens. ConfigError."""
    lengths = "max_completion_tokens", "max_tokens"
    most = _number(data, lengths, published.max_new_tokens, 1, 2**53)
    return replace(
        published,
        max_new_tokens=min(int(most), MOST_ANSWER_TOKENS),
        temperature=_number(data, ("temperature",), published.temperature, 0.0, 2.0),
        top_p=_number(data, ("top_p",), published.top_p, 1e-6, 1.0),
        seed=int(_number(data, ("seed",), 0, 0, 2**53)),
    )


def _read_messages(messages: object) -> tuple[str, list[Turn], str | None]:
    """Return the question, the turns before it, and the system prompt. ConfigError.

    Messages of one role in a row are one text. What the assistant writes before the first question is left out.
    """
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ConfigError("messages: expected a list of objects")
    if not any(one.get("role") == "user" for one in messages):
        raise ConfigError("messages: there is none with the role user")
    system, texts = list[str](), list[tuple[str, str]]()
    for one in messages:
        role, text = one.get("role"), _read_text(one.get("content"))
        if role in ("system", "developer"):
            system.append(text)
        elif role not in ("user", "assistant"):
            raise ConfigError("messages: a role is none of user, assistant, system and developer")
        elif texts and texts[-1][0] == role:
            texts[-1] = (role, f"{texts[-1][1]}\n\n{text}")
        elif texts or role == "user":
            texts.append((role, text))
    role, question = texts.pop()
    if role != "user":
        raise ConfigError("messages: the last one must have the role user")
    admit_question(question, "messages: the question")
    turns = [(asked, answer) for (_, asked), (_, answer) in zip(texts[::2], texts[1::2], strict=True)]
    return question, turns, "\n\n".join(filter(str.strip, system)) or None


def _read_text(content: object) -> str:
    """Return the text of a message, whose parts stand one below the other."""
    if isinstance(content, list):
        if not all(isinstance(one, dict) and one.get("type") == "text" for one in content):
            raise ConfigError("messages: a state answers questions in text and takes no pictures")
        texts = [one.get("text") for one in content]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError("messages: a part has no text")
        return "\n".join(texts)
    return content if isinstance(content, str) else ""


def _number(data: Mapping[str, Any], names: tuple[str, ...], default: float, least: float, most: float) -> float:
    name = next((one for one in names if data.get(one) is not None), None)
    value = default if name is None else data[name]
    if type(value) not in (int, float) or not least <= value <= most:
        raise ConfigError(f"{name}: expected a number from {least:g} to {most:g}")
    return float(value)


class Completion:
    """An answer as OpenAI's chat completions have it: whole, or the events of a stream."""

    def __init__(self, request: ChatRequest) -> None:
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
            **_extras(answer),
        }

    def begin(self) -> str:
        """Return the events before the first piece."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> str:
        """Return the event of a piece."""
        return self._chunk({"content": text})

    def end(self, answer: Answer) -> str:
        """Return the events after the last piece."""
        last = self._chunk({}, self._reason(answer), **_extras(answer))
        if self._request.usage:
            last += _event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answer)})
        return last + "data: [DONE]\n\n"

    def fail(self, error: Mapping[str, Any]) -> str:
        """Return the event of an error in the middle of an answer."""
        return _event({"error": error})

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **more})

    @staticmethod
    def _reason(answer: Answer) -> str:
        return "stop" if answer.finish_reason == "stop" else "length"


def _extras(answer: Answer) -> dict[str, Any]:
    """Return what is not in OpenAI's interface.

    The stream time of the state; why the answer ended, since "repetition" has no word there; how many earlier turns the
    model read; and the evidence, if it was wanted.
    """
    found: dict[str, Any] = {
        "stream_time_s": answer.stream_time_s,
        "ended": answer.finish_reason,
        "turns": answer.turns,
    }
    if answer.evidence is not None:
        found["evidence"] = [asdict(span) for span in answer.evidence.spans]
        found["faint"] = answer.evidence.faint
    return found


def _event(data: Mapping[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.context_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.context_tokens + answer.tokens,
    }
