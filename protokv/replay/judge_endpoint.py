"""A judge behind an OpenAI-compatible endpoint, with the `openai` client (the extra `judge`).

Address and key come from OPENAI_BASE_URL and OPENAI_API_KEY; neither stands in a row or a message. The client repeats a
request after a time-out, a limit of the rate (429) or a failure of the server, with growing pauses. A reply that is no
verdict is asked for again a few times. Replies are kept on disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from protokv.errors import ConfigError, JudgeError
from protokv.replay.judges import (
    MAX_TOKENS,
    PROMPT_HASH,
    SYSTEM,
    Case,
    Judge,
    ReplyCache,
    Verdict,
    read_reply,
    write_user,
)

REPLIES: Final = 3
"""Replies without a verdict before the case is given up."""


class EndpointJudge(Judge):
    """One model of one endpoint."""

    def __init__(self, model: str, cache: Path, *, workers: int = 8, timeout_s: float = 60.0, retries: int = 6) -> None:
        """Make the client; nothing is sent.

        Args:
            model: its name at the endpoint.
            cache: file of replies; made if it is missing.
            workers: most requests at once.
            timeout_s: of each request.
            retries: of each request, after the first try.

        Raises:
            ConfigError: the client is not installed, or there is no key.
        """
        try:
            import openai
        except ImportError as error:
            raise ConfigError("this judge needs the openai client", hint="pip install 'protokv[judge]'") from error
        if not os.environ.get("OPENAI_API_KEY"):
            raise ConfigError(
                "this judge needs a key", hint="set OPENAI_API_KEY, and OPENAI_BASE_URL for another endpoint"
            )
        self._errors: Any = openai
        self._client = openai.OpenAI(timeout=timeout_s, max_retries=retries)
        self._model, self._workers, self._cache = model, workers, ReplyCache(cache)
        address = urlsplit(str(self._client.base_url))
        self.label = f"{model} at {address.hostname}, prompt {PROMPT_HASH}"

    def read(self, cases: Sequence[Case]) -> Iterator[tuple[int, Verdict | None]]:
        """Judge the cases that are not in the cache, several at once; ask equal cases once."""
        keys = [self._cache.key(self.label, case) for case in cases]
        known = self._cache.find(keys)
        asked: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            if key in known:
                yield index, read_reply(known[key])
            else:
                asked.setdefault(key, []).append(index)
        pool = ThreadPoolExecutor(self._workers)
        try:
            waiting = {pool.submit(self._ask, cases[indices[0]]): key for key, indices in asked.items()}
            for done in as_completed(waiting):
                reply, key = done.result(), waiting[done]
                if reply is not None:
                    self._cache.keep(key, reply)
                for index in asked[key]:
                    yield index, None if reply is None else read_reply(reply)
        finally:
            pool.shutdown(cancel_futures=True)

    def _ask(self, case: Case) -> str | None:
        """Return a reply with a verdict; None if there is none after some tries."""
        messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": write_user(case)}]
        for _ in range(REPLIES):
            try:
                completion = self._client.chat.completions.create(
                    model=self._model, messages=messages, max_tokens=MAX_TOKENS, temperature=0
                )
                reply = completion.choices[0].message.content or ""
                read_reply(reply)
                return reply
            except (
                self._errors.AuthenticationError,
                self._errors.NotFoundError,
                self._errors.PermissionDeniedError,
            ) as e:
                raise JudgeError(
                    f"the judge's endpoint refuses {self._model}: {type(e).__name__}",
                    hint="check OPENAI_API_KEY, OPENAI_BASE_URL and the model's name",
                ) from e
            except self._errors.APIConnectionError as e:
                # The client has retried time-outs already.
                if not isinstance(e, self._errors.APITimeoutError):
                    raise JudgeError(
                        f"the judge's endpoint cannot be reached: {type(e).__name__}", hint="check OPENAI_BASE_URL"
                    ) from e
                return None
            except self._errors.APIStatusError:
                return None
            except (ValueError, TypeError, AttributeError, LookupError, self._errors.APIResponseValidationError):
                # The reply is no verdict, or no completion at all.
                continue
        return None
