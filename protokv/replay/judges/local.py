"""A judge on this machine: a model of our own loader, asked the published prompt without any video."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protokv.backbones.base import Backbone
from protokv.config import SlidingWindowConfig
from protokv.errors import ConfigError
from protokv.generate import Decoding
from protokv.replay.judges.base import Case, Judge, Verdict
from protokv.replay.judges.prompt import MAX_TOKENS, PROMPT_HASH, SYSTEM, read_reply, write_user
from protokv.session import Session


class LocalJudge(Judge):
    """One backbone. Its chat template has no place for a system turn of ours, so both parts stand in the user's."""

    def __init__(self, backbone: Backbone) -> None:
        """Start an empty session, which every case is asked of."""
        identity = backbone.identity
        self.label = f"{identity.name} (weights {identity.weights_digest[:12]}), prompt {PROMPT_HASH}"
        self._session = Session.start(backbone, SlidingWindowConfig(budget=1))

    def read(self, cases: Sequence[Case]) -> Iterator[tuple[int, Verdict | None]]:
        """Ask one after another, greedily."""
        for index, case in enumerate(cases):
            try:
                answer = self._session.ask(f"{SYSTEM}\n\n{write_user(case)}", Decoding(MAX_TOKENS))
                yield index, read_reply(answer.text)
            except (ConfigError, ValueError):
                # An answer that spells a control token cannot be put to the model; others are no verdict.
                yield index, None
