"""Conversations with pictures: each is a session that is found by the messages of a request.

Clients send the last turns of a conversation again and again, each with its pictures. The session
that has taken these turns goes on: only what is new is fed, and what a client has dropped stays in
memory. Knows no web.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

import numpy as np

from protokv.stream.session import Session

# Of a request. A conversation is found by as many of its last ones.
MOST_MESSAGES = 4096
# A request that begins in the middle of a conversation has so many of its pictures.
_LEAST_PICTURES = 2


class ChatMessage:
    """A message as a conversation has it: a text, and the bytes of its pictures."""

    def __init__(self, role: str, text: str, files: Sequence[bytes] = ()) -> None:
        """Take its parts; its digest is of all of them."""
        self.role = role
        self.text = text
        self.files = files
        self.digest = digest_parts([role.encode(), text.encode(), *files])


def digest_parts(parts: Iterable[bytes]) -> bytes:
    """Return the SHA-256 of some parts; others that are equal when joined have another."""
    each = (hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(b"".join(each)).digest()


class Conversation:
    """A session, and the messages that it has taken."""

    grown = False  # whether a later request went on with it
    _began_s: float | None = None

    def __init__(self, key: bytes, session: Session) -> None:
        """Begin without messages; `key` tells its client, model and system prompt."""
        self.key = key
        self.session = session
        self.used_s = monotonic()
        self._count = 0
        self._last: list[bytes] = []

    def count_known(self, messages: Sequence[ChatMessage]) -> int:
        """Return how many messages, from the first of a request on, are the last that it has taken.

        They are all of its messages, or have at least two pictures; else it is not the conversation
        that is meant, and 0.
        """
        run = [one.digest for one in messages]
        for known in range(min(len(run), len(self._last)), 0, -1):
            if run[:known] == self._last[-known:]:
                pictures = sum(len(one.files) for one in messages[:known])
                return known if known == self._count or pictures >= _LEAST_PICTURES else 0
        return 0

    def take(self, message: ChatMessage, decode: Callable[[bytes], Any]) -> None:
        """Watch the pictures of a message: all of them, or none if `decode` refuses one.

        Each is a step that stands at its time of arrival, or behind the last one.
        """
        session = self.session
        count = session.clock.frames_per_step
        pictures = (np.stack([decode(file)] * count) for file in message.files)
        for step in [session.backbone.prepare(images) for images in pictures]:
            now_s = monotonic()
            self._began_s = now_s if self._began_s is None else self._began_s
            start_s = max(now_s - self._began_s, session.clock.stream_time_s)
            session.watch_prepared([step], [start_s])
        self._count += 1
        self._last = [*self._last, message.digest][-MOST_MESSAGES:]


def find_conversation(
    held: Iterable[Conversation], key: bytes, messages: Sequence[ChatMessage]
) -> tuple[Conversation | None, int]:
    """Return the conversation of a client that a request goes on with, and how many of its messages
    are known: the one that knows most.

    None: nobody knows any, or two know as many and it cannot be told which one is meant.
    """
    known = [(one.count_known(messages), one) for one in held if one.key == key]
    most = max((count for count, _ in known), default=0)
    found = [one for count, one in known if count == most > 0]
    return (found[0], most) if len(found) == 1 else (None, 0)
