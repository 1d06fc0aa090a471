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
from protokv.errors import ConfigError, ProtoKVError, escape_text
from protokv.serve.conversations import MOST_MESSAGES, ChatMessage, digest_parts
from protokv.serve.schemas import read_response_format
from protokv.state.sources import VideoPlace, describe_spans
from protokv.stream.answer import Answer
from protokv.texts import (
    JsonObject,
    JsonRecord,
    check_question_text,
    parse_strict_json,
)

_MOST_ANSWER_TOKENS = 1024

# Fields that change no answer of a state, and values that ask for nothing.
_HARMLESS = (
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "tool_choice",
    "function_call",
)
_NOTHING = {"n": 1, "tools": [], "functions": [], "logit_bias": {}, "modalities": ["text"]}


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
        given = self.content or []
        parts = [_TextPart(given)] if isinstance(given, str) else given
        files = [part.read() for part in parts if isinstance(part, _PicturePart)]
        if files and self.role != "user":
            raise ConfigError("messages: only those of the user have pictures")
        text = "\n".join(part.text for part in parts if isinstance(part, _TextPart))
        return ChatMessage(self.role, text, files)


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a request that a state can answer; `choices`, `evidence`, `at` and
    `at_most_wrong` are our own.
    """

    model: str
    messages: Annotated[list[_Message], msgspec.Meta(max_length=MOST_MESSAGES)]
    stream: bool = False
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=1e-6, le=1)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    stop: str | Annotated[list[str], msgspec.Meta(max_length=4)] = ""
    choices: str | Annotated[list[str], msgspec.Meta(max_length=64)] = ""
    response_format: Any = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    evidence: bool = False
    at: str | float | None = None
    at_most_wrong: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    user: Any = None
    prompt_cache_key: Any = None


def parse_chat_request(body: bytes, published: Decoding) -> ChatRequest:
    """Return the request in a body; `published` is how the model chooses tokens where the request
    does not say.

    ConfigError: a state cannot answer it; the field is named.
    """
    asked = _read_fields(body)
    messages = [one.read() for one in asked.messages]
    spoken = [one for one in messages if one.role in ("user", "assistant")]
    prompts = [one.text for one in messages if one.role in ("system", "developer")]
    system = "\n\n".join(filter(str.strip, prompts)) or None
    question, turns = _divide_turns(spoken)
    forms, schema = read_response_format(asked.response_format)
    if (forms or schema) and asked.choices:
        raise ConfigError("choices: response_format says already what the answer is")
    if asked.top_logprobs and not asked.logprobs:
        raise ConfigError("top_logprobs: it needs logprobs to be true")
    most = asked.max_completion_tokens or asked.max_tokens or published.max_new_tokens
    decoding = replace(
        published,
        max_new_tokens=min(most, _MOST_ANSWER_TOKENS),
        temperature=published.temperature if asked.temperature is None else asked.temperature,
        top_p=asked.top_p or published.top_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        seed=asked.seed,
        stop=_list_texts(asked.stop),
        choices=tuple(forms) or _list_texts(asked.choices),
        schema=schema,
        top_logprobs=asked.top_logprobs if asked.logprobs else None,
    )
    apart = [asked.model, system, asked.user, asked.prompt_cache_key]
    return ChatRequest(
        model=asked.model,
        text=question,
        turns=turns,
        system=system,
        decoding=decoding,
        stream=asked.stream,
        usage=asked.stream_options is not None and asked.stream_options.include_usage,
        evidence=asked.evidence,
        at=f"{asked.at:.3f}" if isinstance(asked.at, float) else asked.at,
        at_most_wrong=asked.at_most_wrong,
        forms=forms,
        messages=spoken,
        topic=digest_parts([json.dumps(apart).encode()]),
    )


def _read_fields(body: bytes) -> _Fields:
    """Return the fields of a request. ConfigError, with the field: it asks for what a state cannot
    do.
    """
    try:
        data = parse_strict_json(body)
        if isinstance(data, dict):
            # Clients send null for what they do not ask for.
            data = {
                name: value
                for name, value in data.items()
                if name not in _HARMLESS and value not in (None, _NOTHING.get(name))
            }
        return msgspec.convert(data, _Fields)
    except ValueError as error:
        raise ConfigError(
            f"no request that a state can answer: {escape_text(error, 240)}"
        ) from None


def _list_texts(given: str | list[str]) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    return tuple(filter(None, texts))


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


_UNENDED = {"logprobs": None, "finish_reason": None}


class ChatCompletion:
    """An answer as OpenAI's chat completions have it: whole, or a stream of events."""

    def __init__(
        self,
        request: ChatRequest,
        decode: Callable[[list[int]], str],
        notice: str,
        places: Sequence[VideoPlace],
    ) -> None:
        """Begin; `decode` is the backbone's, `notice` is said of the answer, and `places` are those
        of the videos in the stream.
        """
        self._notice = notice
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
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, **self._ending(answer)}],
            "usage": _usage(answer),
            **self._extras(answer),
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
        yield self._chunk(_list_delta({"role": "assistant", "content": ""}))
        try:
            while not isinstance(item, Answer):
                yield self._chunk(_list_delta({"content": self._forms.get(item, item)}))
                item = await anext(pieces)
        except ProtoKVError as error:
            yield _event({"error": describe(error)})
            return
        yield self._chunk(_list_delta({}, self._ending(item)), **self._extras(item))
        if self._request.usage:
            yield self._chunk([], usage=_usage(item))
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[JsonObject], **more: Any) -> str:
        head = {**self._head, "object": "chat.completion.chunk"}
        return _event({**head, "choices": choices, **more})

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
        if answer.evidence is not None:
            found["evidence"] = describe_spans(answer.evidence.spans, self._places)
            found["faint"] = answer.evidence.faint
        if self._notice:
            found["notice"] = self._notice
        return found


def _list_delta(delta: JsonRecord, ending: JsonRecord = _UNENDED) -> list[JsonObject]:
    return [{"index": 0, "delta": delta, **ending}]


def _event(data: JsonRecord) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    read = answer.context_tokens
    given = answer.tokens
    return {"prompt_tokens": read, "completion_tokens": given, "total_tokens": read + given}
