"""Questions whose tokens come from an engine of others, that holds the slots of the state.

Prompts, choices, stops and penalties are those of a session; its model needs no weights. The engine
speaks the completions of OpenAI and what vLLM adds to them: ids in place of text, log probabilities
by id, `kv_transfer_params`. `protokv.vllm` is the other side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from http.client import HTTPException
from statistics import fmean
from threading import Lock
from typing import Any, Self
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import torch

from protokv.core.decoding import TokenLogprob
from protokv.errors import ConfigError, EngineError, escape_text
from protokv.state.reader import StateReader
from protokv.stream.asking import AnswerWriter
from protokv.stream.opening import open_session
from protokv.stream.session import Session
from protokv.stream.slots import count_slots, digest_commit
from protokv.texts import JsonObject, shorten_text

_PATIENCE_S = 600.0  # for the next token; a long queue may stand before the first one
_AGAIN = "ask again; its log says if the state went away meanwhile"


class _NoRedirects(HTTPRedirectHandler):
    """Follows no reply to another address, which would get the key."""

    def redirect_request(self, *_: Any) -> None:
        """Return nothing, so that the reply is an error."""


_OPENER = build_opener(_NoRedirects)


class Engine:
    """An engine behind an address. Threads may share it."""

    def __init__(self, url: str) -> None:
        """Name it by an address such as http://host:8000, with or without /v1. ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"{url!r} is no address", hint="for example http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")

    def complete(self, asked: JsonObject) -> Iterator[JsonObject]:
        """Yield the chunks of a completion as they come. EngineError."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("PROTOKV_ENGINE_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        body = json.dumps(asked | {"stream": True}).encode()
        request = Request(f"{self.url}/v1/completions", body, headers)
        ended = False
        try:
            with _OPENER.open(request, timeout=_PATIENCE_S) as reply:
                for line in reply:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        chunk = json.loads(data)
                        if "error" in chunk:
                            raise EngineError(self._explain(data, 500), hint=_AGAIN)
                        ended |= any(one.get("finish_reason") for one in chunk.get("choices", ()))
                        yield chunk
            if not ended:
                # vLLM 0.31 ends so what fails before its first token.
                raise EngineError(f"the engine at {self.url} broke an answer off", hint=_AGAIN)
        except HTTPError as error:
            with error:
                raise EngineError(
                    self._explain(error.read(1 << 16), error.code),
                    hint="write what it serves: protokv inspect STATE -o DIR/NAME.kv.safetensors"
                    if error.code == 400
                    else _AGAIN,
                ) from None
        except (OSError, HTTPException, ValueError) as error:
            raise EngineError(
                f"the engine at {self.url} does not answer: {escape_text(error, 200)}",
                hint="start it, or name another one with --engine",
            ) from None

    def _explain(self, body: bytes, code: int) -> str:
        """Return what the engine said, in one line."""
        said = ""
        try:
            found = json.loads(body)
            said = str(found.get("error", found).get("message", ""))
        except (ValueError, AttributeError):
            pass
        why = escape_text(shorten_text(" ".join(said.split())), 300) or f"HTTP status {code}"
        return f"the engine at {self.url} refuses: {why}"


class EngineSession(Session):
    """A session that an engine answers for."""

    engine: Engine
    asked: dict[str, str]  # the state and its commit
    slots: int
    joins = False
    tells_evidence = False
    _lock: Any  # for the memory

    @classmethod
    def open(
        cls, reader: StateReader, engine: Engine, name: str, backbone: Any = None, **how: Any
    ) -> EngineSession:
        """Open a state that the engine has by a name; arguments and errors as `open_session`.

        ConfigError: no other engine can serve it.
        """
        bare = {"device": "meta", "device_map": None}
        session = open_session(reader, backbone, kind=cls, **how | bare)
        return session.answer_by(engine, name, digest_commit(reader.state))

    def answer_by(self, engine: Engine, name: str, commit: str) -> Self:
        """Let an engine answer that has the slots by a name. ConfigError, as `open`."""
        self.slots = count_slots(self)
        self.engine = engine
        self._lock = Lock()
        self.asked = {"state": name, "commit": commit}
        return self

    def _write(self, ids: list[int], writer: AnswerWriter, evidence: bool) -> Generator[str]:
        """Let the engine write. ConfigError: it is to do what no engine does. EngineError."""
        decoding = writer.decoding
        if decoding.schema or evidence:
            raise ConfigError(
                "an engine does not tell what its answers stand on, and is held to no schema but "
                "choices",
                hint="ask for that without --engine",
            )
        with self._lock:
            ids, _, _ = self.aim(ids)
        body = {
            # Ids below 0 are slots already.
            "prompt": [token for token in ids if token >= 0],
            "kv_transfer_params": self.asked,
            "return_tokens_as_token_ids": True,
            "temperature": decoding.temperature,
            "max_tokens": 1 if writer.firsts else decoding.max_new_tokens,
            "logprobs": decoding.top_logprobs or 0,
        }
        writer.answer = replace(writer.answer, context_tokens=self.slots)
        if writer.firsts:
            wanted = sorted({token for each in writer.firsts for token in each})
            body |= {"logprob_token_ids": wanted, "logprobs": len(wanted)}
            (chances,) = _read_chances(self.engine.complete(body))
            found = dict(chances)
            yield from writer.choose(
                [torch.tensor([found[one] for one in own]).logsumexp(0) for own in writer.firsts]
            )
            return
        named = ("top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
        body |= {name: getattr(decoding, name) for name in named}
        body |= {"top_k": decoding.top_k or -1, "stop_token_ids": [*self.backbone.stop_ids]}
        said = list[list[TokenLogprob]]()
        with closing(_read_chances(self.engine.complete(body))) as tokens:
            for chances in tokens:
                said.append(chances)
                yield from writer.push(chances[0].id)
                if writer.reason:
                    break
        mean = fmean(chances[0].log_probability for chances in said) if said else 0.0
        yield from writer.finish(mean, None if decoding.top_logprobs is None else said)


def _read_chances(chunks: Iterable[JsonObject]) -> Generator[list[TokenLogprob]]:
    """Yield the chances of each token of a completion, first that of the chosen one."""
    for chunk in chunks:
        for found in (choice.get("logprobs") or {} for choice in chunk.get("choices", ())):
            each = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
            for token, chance, top in each if found else ():
                likely = sorted((top or {}).items(), key=lambda one: -one[1])
                yield [
                    TokenLogprob(int(name.removeprefix("token_id:")), float(own))
                    for name, own in [(token, chance), *likely]
                ]
