"""The part of OpenAI's responses that a state can answer, by the rules of `chat`.

A state keeps no conversation and no response. See https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from protokv.core.decoding import Decoding
from protokv.core.session import Answer
from protokv.errors import ConfigError
from protokv.serve.chat import Request, conversation_of, decoding_of, event, extras, read_object

# Fields that a state cannot serve, with the values that ask for nothing.
_UNUSED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "include": (None, []),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "text": (None, {}, {"format": {"type": "text"}}),
    "tools": (None, []),
}


def parse(body: bytes, published: Decoding) -> Request:
    """Return the request in a body; `published` is how the model chooses tokens where the request does not say.

    Raises:
        ConfigError: a state cannot answer it; the field is named.
    """
    data = read_object(body, _UNUSED)
    given = data.get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    question, turns, system = conversation_of(messages, "input")
    instructions = data.get("instructions")
    if not isinstance(instructions, str | None):
        raise ConfigError("instructions: expected text")
    return Request(
        model=data["model"],
        question=question,
        turns=turns,
        system="\n\n".join(filter(None, (instructions, system))) or None,
        decoding=decoding_of(data, published, "max_output_tokens"),
        stream=data.get("stream") is True,
        anyway=data.get("anyway") is True,
        evidence=data.get("evidence") is True,
    )


class Reply:
    """An answer as a response of OpenAI: whole, or the events of a stream."""

    def __init__(self, request: Request) -> None:
        self._request, self._began = request, int(time.time())
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._sequence = 0

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the whole answer."""
        cut = answer.finish_reason != "stop"
        status = "incomplete" if cut else "completed"
        return {
            **self._response(status, [self._item(status, [_part(answer.text)])]),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": answer.context_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answer.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.context_tokens + answer.tokens,
            },
            **extras(answer),
        }

    def begin(self) -> str:
        """Return the events before the first piece."""
        response = self._response("in_progress", [])
        return "".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._event("response.content_part.added", **self._place, part=_part("")),
            )
        )

    def piece(self, text: str) -> str:
        """Return the event of a piece."""
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, answer: Answer) -> str:
        """Return the events after the last piece."""
        whole = self.whole(answer)
        return "".join(
            (
                self._event("response.output_text.done", **self._place, text=answer.text, logprobs=[]),
                self._event("response.content_part.done", **self._place, part=_part(answer.text)),
                self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
                self._event(f"response.{whole['status']}", response=whole),
            )
        )

    def fail(self, error: Mapping[str, Any]) -> str:
        """Return the event of an error in the middle of an answer."""
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields})

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        decoding = self._request.decoding
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._began,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._request.system,
            "max_output_tokens": decoding.max_new_tokens,
            "model": self._request.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": decoding.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": decoding.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
