"""The part of OpenAI's chat completions that a state can answer: requests, checked field by field, and replies.

A state keeps no conversation: the last message of the user is the question, and earlier ones are ignored. Fields that
a state cannot serve are refused by name. See https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from protokv.core.decoding import Decoding
from protokv.core.session import Answer
from protokv.errors import ConfigError

MOST_TOKENS = 1024

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
    """A question to a state."""

    model: str
    question: str
    decoding: Decoding
    stream: bool
    usage: bool  # end the stream with the number of tokens
    anyway: bool  # not in OpenAI's interface: answer even if the model cannot make sense of the video


def parse(body: bytes) -> Request:
    """Return the request in a body.

    Raises:
        ConfigError: a state cannot answer it; the field is named.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise ConfigError("the body is not JSON") from None
    if not isinstance(data, dict):
        raise ConfigError("the body is not a JSON object")
    for name, allowed in _UNUSED.items():
        if data.get(name) not in allowed:
            raise ConfigError(f"{name}: a state cannot do that")
    if not isinstance(data.get("model"), str):
        raise ConfigError("model: expected the name of a state")
    stream_options = data.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise ConfigError("stream_options: expected an object")
    return Request(
        model=data["model"],
        question=_question(data.get("messages")),
        decoding=Decoding(
            max_new_tokens=int(_number(data, ("max_completion_tokens", "max_tokens"), 64, 1, MOST_TOKENS)),
            # The default is greedy: answers should repeat.
            temperature=_number(data, ("temperature",), 0.0, 0.0, 2.0),
            top_p=_number(data, ("top_p",), 1.0, 1e-6, 1.0),
            seed=int(_number(data, ("seed",), 0, 0, 2**53)),
        ),
        stream=data.get("stream") is True,
        usage=stream_options.get("include_usage") is True,
        anyway=data.get("anyway") is True,
    )


def _question(messages: object) -> str:
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ConfigError("messages: expected a list of objects")
    asked = [one for one in messages if one.get("role") == "user"]
    if not asked:
        raise ConfigError("messages: there is none with the role user")
    content = asked[-1].get("content")
    if isinstance(content, list):
        if not all(isinstance(one, dict) and one.get("type") == "text" for one in content):
            raise ConfigError("messages: a state answers questions in text and takes no pictures")
        content = "\n".join(str(one.get("text")) for one in content)
    if not isinstance(content, str) or not content.strip():
        raise ConfigError("messages: the question is empty")
    return content


def _number(data: dict[str, Any], names: tuple[str, ...], default: float, least: float, most: float) -> float:
    name = next((one for one in names if data.get(one) is not None), None)
    value = default if name is None else data[name]
    if type(value) not in (int, float) or not least <= value <= most:
        raise ConfigError(f"{name}: expected a number from {least:g} to {most:g}")
    return float(value)


def completion(number: str, request: Request, answer: Answer) -> dict[str, Any]:
    """Return the whole answer."""
    return {
        **_head(number, request.model, "chat.completion"),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": None,
                "finish_reason": _reason(answer),
            }
        ],
        "usage": _usage(answer),
        # Not in OpenAI's interface: the stream time of the state that answered, why the answer ended ("repetition"
        # has no word there), and that the model cannot make sense of the video.
        "stream_time_s": answer.stream_time_s,
        "ended": answer.finish_reason,
        **({"beyond_model": True} if answer.beyond_model else {}),
    }


def chunk(number: str, request: Request, piece: str | None, answer: Answer | None = None) -> dict[str, Any]:
    """Return a piece of a streamed answer; `piece` is None at the beginning, `answer` is set at the end."""
    delta: dict[str, Any] = {"role": "assistant", "content": ""} if piece is None else {"content": piece}
    reason = None
    if answer is not None:
        delta, reason = {}, _reason(answer)
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {**_head(number, request.model, "chat.completion.chunk"), "choices": [choice]}


def usage_chunk(number: str, request: Request, answer: Answer) -> dict[str, Any]:
    """Return the token counts of a streamed answer."""
    return {**_head(number, request.model, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)}


def _head(number: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": model}


def _reason(answer: Answer) -> str:
    return "stop" if answer.finish_reason == "stop" else "length"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.context_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.context_tokens + answer.tokens,
    }
