"""What the server answers, as OpenAPI (https://spec.openapis.org/oas/v3.1.0), for people and for generators."""

from __future__ import annotations

from typing import Any

from protokv import __version__

_STATE = {"name": "name", "in": "query", "required": True, "schema": {"type": "string"}}
_SOURCE = {"name": "source", "in": "query", "required": True, "schema": {"type": "integer"}}
_OWN = (
    "All messages count: those of user and assistant are the conversation, those of system and developer stand in "
    "front of the last question. Besides OpenAI's fields: `evidence` (boolean) asks for the moments of the stream that "
    "the answer stands on. The answer has them as `evidence` and `faint`, `stream_time_s`, the stream time of the "
    "state, `ended`: stop, length or repetition, and `turns`, how many earlier turns the model read. A state whose "
    "model cannot make sense of its video is an error with the code `beyond_model`, unless `anyway` (boolean) is "
    "given; the answer then has `beyond_model`."
)


def describe() -> dict[str, Any]:
    """Return the description."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ProtoKV",
            "version": __version__,
            "description": "Questions to saved states of videos. Each state is a model by its name.",
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
        "paths": {
            "/": _get("The page: look at states and ask them.", "text/html"),
            "/health": _get("Whether the server runs. Needs no token.", security=[{}]),
            "/docs": _get("This description. Needs no token.", security=[{}]),
            "/v1/models": _get("The states, as a list of models."),
            "/v1/models/{name}": _get("One of them.", parameters=[{**_STATE, "in": "path"}]),
            "/v1/chat/completions": _post("Ask a state, as a chat completion of OpenAI.", ["model", "messages"]),
            "/v1/responses": _post("Ask a state, as a response of OpenAI.", ["model", "input"]),
            "/page/state": _get("What a state has watched, with its thumbnails.", parameters=[_STATE]),
            "/page/videos": _get("Its videos that are at hand, and where they play.", parameters=[_STATE]),
            "/page/video": _get("A video, whole or a range of it.", "video/*", parameters=[_STATE, _SOURCE]),
        },
    }


def _get(summary: str, kind: str = "application/json", **more: Any) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": {"description": "OK", "content": {kind: {}}}}, **more}}


def _post(summary: str, required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "required": required, "properties": {"stream": {"type": "boolean"}}}
    return {
        "post": {
            "summary": summary,
            "description": _OWN,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {
                "200": {"description": "OK", "content": {"application/json": {}, "text/event-stream": {}}},
                "4XX": {"description": "`error.message` says what to change."},
                "503": {"description": "Too many questions at once, or no answer in time."},
            },
        }
    }
