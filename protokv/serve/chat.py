"""The part of OpenAI's chat completions that a state can answer: requests, checked field by field,
and replies.

A state keeps no conversation: each request brings all of it. Pictures are watched by a session of
the conversation. Fields that a state cannot serve are refused by name. See
https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import dropwhile, groupby
from typing import Annotated, Any, Literal

import msgspec

from protokv.core.backbone import ChatTurn
from protokv.core.decoding import Decoding, TokenLogprob
from protokv.errors import ConfigError, ProtoKVError, did_you_mean, escape_text
from protokv.serve.conversations import MOST_MESSAGES, ChatMessage, digest_parts
from protokv.serve.schemas import read_response_format
from protokv.state.sources import VideoPlace, describe_spans
from protokv.stream.answer import Answer
from protokv.texts import (
    JsonObject,
    JsonRecord,
    check_question_text,
    find_invalid_character,
    parse_strict_json,
)

_MOST_ANSWER_TOKENS = 1024
_LENGTHS = "max_completion_tokens", "max_tokens"

# Fields that a state cannot serve: the values that ask for nothing, and what to do instead.
_UNUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1, None), "a state gives 1 answer; ask again with another seed"),
    "tools": ((None, []), "a state answers in text and calls nothing"),
    "functions": ((None, []), "a state answers in text and calls nothing"),
    "logit_bias": (
        (None, {}),
        "supported are temperature, top_p, presence_penalty and frequency_penalty",
    ),
    "modalities": ((None, ["text"]), 'supported is ["text"]'),
}

_READ = """
model messages stream stream_options temperature top_p presence_penalty frequency_penalty seed
stop choices response_format logprobs top_logprobs max_tokens max_completion_tokens evidence at
at_most_wrong
"""
# Fields that change no answer of a state.
_HARMLESS = """
user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention
parallel_tool_calls tool_choice function_call
"""
_FIELDS = frozenset((*_READ.split(), *_HARMLESS.split(), *_UNUSED))


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A question to a state, the turns of the conversation before it, and the system prompt; see
    `Session.stream`.
    """

    model: str
    text: str
    turns: Sequence[ChatTurn]
    system: str | None
    decoding: Decoding
    stream: bool
    usage: bool = False  # end the stream with the number of tokens
    # say on which spans of the stream the answer stands; not in OpenAI's interface
    evidence: bool = False
    # the time of which a kept commit answers, as `query --at` takes it; None: the last one
    at: str | None = None
    # give answers of which at most this share is wrong, and withhold the others
    at_most_wrong: float | None = None
    # the JSON that each of the choices stands for; empty: an answer is its own text
    forms: Mapping[str, str] = field(default_factory=dict)
    # all that was said, without system prompts, and what tells this conversation from others
    messages: Sequence[ChatMessage] = ()
    topic: bytes = b""


def parse_chat_request(body: bytes, published: Decoding) -> ChatRequest:
    """Return the request in a body; `published` is how the model chooses tokens where the request
    does not say.

    ConfigError: a state cannot answer it; the field is named.
    """
    data = _read_object(body)
    options = data.get("stream_options")
    messages, system = _read_messages(data.get("messages"))
    question, turns = _divide_turns(messages)
    forms, schema = read_response_format(data.get("response_format"))
    if (forms or schema) and data.get("choices"):
        raise ConfigError("choices: response_format says already what the answer is")
    how = {"choices": list(forms), "schema": schema} if forms else {"schema": schema}
    apart = [data["model"], system, data.get("user"), data.get("prompt_cache_key")]
    promised = data.get("at_most_wrong") is not None
    return ChatRequest(
        model=data["model"],
        text=question,
        turns=turns,
        system=system,
        decoding=_read_decoding(data | how, published),
        stream=data.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        evidence=data.get("evidence") is True,
        at=_read_time(data.get("at")),
        at_most_wrong=_number(data, ("at_most_wrong",), 0, 0, 1) if promised else None,
        forms=forms,
        messages=messages,
        topic=digest_parts([json.dumps(apart).encode()]),
    )


def _read_time(at: object) -> str | None:
    """Return a time as text, which is sought in the state. ConfigError."""
    if at is None or isinstance(at, str):
        return at
    if isinstance(at, bool) or not isinstance(at, int | float):
        raise ConfigError('at: expected seconds of the stream or a text, such as "12m" or "14:05"')
    return f"{at:.3f}"


def _read_object(body: bytes) -> JsonObject:
    """Return the JSON object in a body, which names a model. ConfigError if it asks for what a
    state cannot do.
    """
    try:
        data = parse_strict_json(body)
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError("the body is not a JSON object")
    for name, value in data.items():
        # Clients send null for what they do not ask for.
        if name not in _FIELDS and value is not None:
            likely = did_you_mean(name, _FIELDS) or "a state does not know it"
            raise ConfigError(f"{escape_text(name)}: no such field is served; {likely}")
    for name, (allowed, instead) in _UNUSED.items():
        if data.get(name) not in allowed:
            raise ConfigError(f"{name}: {instead}")
    if not isinstance(data.get("model"), str) or find_invalid_character(data["model"]) is not None:
        raise ConfigError("model: expected the name of a state")
    return data


def _read_decoding(data: JsonRecord, published: Decoding) -> Decoding:
    if data.get("top_logprobs") and data.get("logprobs") is not True:
        raise ConfigError("top_logprobs: it needs logprobs to be true")
    top = _number(data, ("top_logprobs",), 0, 0, 20)
    return replace(
        published,
        max_new_tokens=int(
            min(_number(data, _LENGTHS, published.max_new_tokens, 1, 2**53), _MOST_ANSWER_TOKENS)
        ),
        temperature=_number(data, ("temperature",), published.temperature, 0.0, 2.0),
        top_p=_number(data, ("top_p",), published.top_p, 1e-6, 1.0),
        presence_penalty=_number(data, ("presence_penalty",), 0.0, -2.0, 2.0),
        frequency_penalty=_number(data, ("frequency_penalty",), 0.0, -2.0, 2.0),
        seed=int(_number(data, ("seed",), 0, 0, 2**53)),
        stop=_read_texts(data, "stop", 4),
        choices=_read_texts(data, "choices", 64),
        schema=data["schema"],
        top_logprobs=int(top) if data.get("logprobs") is True else None,
    )


def _read_texts(data: JsonRecord, name: str, most: int) -> tuple[str, ...]:
    """Return the texts of a field, of which there may be one or none. ConfigError."""
    texts = [data[name]] if isinstance(data.get(name), str) else data.get(name) or []
    if (
        not isinstance(texts, list)
        or len(texts) > most
        or not all(isinstance(one, str) and one for one in texts)
    ):
        raise ConfigError(f"{name}: expected a text, or a list of at most {most} texts")
    return tuple(texts)


class _TextPart(msgspec.Struct, tag="text"):
    """A part of a message that is text."""

    text: str


class _Picture(msgspec.Struct):
    """A picture by its address."""

    url: str


class _PicturePart(msgspec.Struct, tag="image_url"):
    """A part of a message that is a picture."""

    image_url: _Picture

    def read(self) -> bytes:
        """Return the file in a data URL. ConfigError: it is none; no address is ever fetched."""
        head, _, data = self.image_url.url.partition(",")
        with suppress(ValueError):
            if head.startswith("data:") and head.endswith(";base64"):
                return base64.b64decode(data, validate=True)
        raise ConfigError(
            "messages: a picture is a data URL, data:image/jpeg;base64,... and whole; no address "
            "is fetched"
        )


class _Message(msgspec.Struct):
    """A message, whose texts stand one below the other."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_TextPart | _PicturePart] | None = None

    def read(self) -> ChatMessage:
        """Return its text and its pictures. ConfigError: it has a picture that cannot be."""
        parts = self.content if isinstance(self.content, list) else []
        files = [part.read() for part in parts if isinstance(part, _PicturePart)]
        if files and self.role != "user":
            raise ConfigError("messages: only those of the user have pictures")
        text = "\n".join(part.text for part in parts if isinstance(part, _TextPart))
        text = self.content if isinstance(self.content, str) else text
        return ChatMessage(self.role, text, files)


def _read_messages(messages: object) -> tuple[list[ChatMessage], str | None]:
    """Return what user and assistant said, and the system prompt. ConfigError."""
    try:
        read = msgspec.convert(
            messages, Annotated[list[_Message], msgspec.Meta(max_length=MOST_MESSAGES)]
        )
    except msgspec.ValidationError as error:
        why = "they have texts and pictures, each with a role, as OpenAI's chat has them"
        raise ConfigError(f"messages: {escape_text(error)}; {why}") from None
    found = [one.read() for one in read]
    spoken = [one for one in found if one.role in ("user", "assistant")]
    system = [one.text for one in found if one.role in ("system", "developer")]
    return spoken, "\n\n".join(filter(str.strip, system)) or None


def _divide_turns(messages: Sequence[ChatMessage]) -> tuple[str, list[ChatTurn]]:
    """Return the question of a conversation, and the turns before it. ConfigError.

    Messages of one role in a row are one text. What the assistant writes before the first question
    is left out.
    """
    spoken = list(dropwhile(lambda one: one.role == "assistant", messages))
    if not spoken:
        raise ConfigError("messages: there is none with the role user")
    if spoken[-1].role != "user":
        raise ConfigError("messages: the last one must have the role user")
    texts = [
        "\n\n".join(one.text for one in alike) for _, alike in groupby(spoken, lambda one: one.role)
    ]
    question = check_question_text(texts.pop(), "messages: the question")
    return question, list(zip(texts[::2], texts[1::2], strict=True))


def _number(
    data: JsonRecord, names: tuple[str, ...], default: float, least: float, most: float
) -> float:
    name = next((one for one in names if data.get(one) is not None), None)
    value = default if name is None else data[name]
    if type(value) not in (int, float) or not least <= value <= most:
        raise ConfigError(
            f"{name}: expected a number from {least:g} {f'to {most:g}' if most < 2**53 else 'on'}"
        )
    return float(value)


_UNENDED = {"logprobs": None, "finish_reason": None}


class ChatCompletion:
    """An answer as OpenAI's chat completions have it: whole, or a stream of events."""

    def __init__(
        self,
        request: ChatRequest,
        decode: Callable[[list[int]], str],
        notice: str = "",
        places: Sequence[VideoPlace] = (),
    ) -> None:
        """Begin; `decode` is the backbone's, `notice` is said of the answer, and `places` are those
        of the videos in the stream.
        """
        self._notice = {"notice": notice} if notice else {}
        self._places = places
        self._request = request
        self._forms = request.forms
        self._decode = decode
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, answer: Answer) -> JsonObject:
        """Return the whole answer."""
        text = self._forms.get(answer.text, answer.text)
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, **self._ending(answer)}
        head = {**self._head, "object": "chat.completion"}
        return {
            **head,
            "choices": [choice],
            "usage": _usage(answer),
            **self._extras(answer),
            **self._notice,
        }

    async def stream(
        self,
        item: str | Answer,
        pieces: AsyncIterator[str | Answer],
        describe: Callable[[ProtoKVError], Any],
    ) -> AsyncIterator[str]:
        """Yield the answer as server-sent events, piece by piece from `item` on; `describe` an
        error in the middle.
        """
        yield self._chunk({"role": "assistant", "content": ""})
        try:
            while not isinstance(item, Answer):
                yield self._chunk({"content": self._forms.get(item, item)})
                item = await anext(pieces)
        except ProtoKVError as error:
            yield _event({"error": describe(error)})
            return
        yield self._chunk({}, self._ending(item), **self._extras(item), **self._notice)
        if self._request.usage:
            yield _event(
                {
                    **self._head,
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": _usage(item),
                }
            )
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: JsonRecord, ending: JsonRecord = _UNENDED, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, **ending}
        return _event(
            {**self._head, "object": "chat.completion.chunk", "choices": [choice], **more}
        )

    def _ending(self, answer: Answer) -> JsonObject:
        """Return why an answer ended, and if wanted the chances of its tokens; a stream has all of
        them at its end.
        """
        found = None
        if answer.chances is not None:
            each = [[self._chance(one) for one in chances] for chances in answer.chances]
            found = {
                "content": [{**chosen, "top_logprobs": top} for chosen, *top in each],
                "refusal": None,
            }
        return {
            "logprobs": found,
            "finish_reason": "stop" if answer.finish_reason == "stop" else "length",
        }

    def _chance(self, one: TokenLogprob) -> JsonObject:
        text = self._decode([one.id])
        return {"token": text, "logprob": one.log_probability, "bytes": list(text.encode())}

    def _extras(self, answer: Answer) -> JsonObject:
        """Return what OpenAI's interface has not: "repetition" as a reason, turns that the model
        read, and the evidence, with the times of the videos where these differ from those of the
        stream.
        """
        found = JsonObject(
            stream_time_s=answer.stream_time_s, ended=answer.finish_reason, turns=answer.turns
        )
        if answer.probabilities is not None:
            chances = answer.probabilities.items()
            found["probabilities"] = {self._forms.get(text, text): one for text, one in chances}
        if answer.promise is not None:
            found["promise"] = asdict(answer.promise)
        if answer.evidence is None:
            return found
        return {
            **found,
            "evidence": describe_spans(answer.evidence.spans, self._places),
            "faint": answer.evidence.faint,
        }


def _event(data: JsonRecord) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    read = answer.context_tokens
    given = answer.tokens
    return {"prompt_tokens": read, "completion_tokens": given, "total_tokens": read + given}
