"""A judge by what the command line says: `exact`, `f1`, `openai:MODEL` or `local:MODEL`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protokv.errors import ConfigError
from protokv.replay.judges.base import Judge


def select_judge(text: str, cache: Path, **placement: Any) -> Judge:
    """Make a judge.

    Args:
        text: which one.
        cache: file of replies, for those that cost something.
        placement: of a local model, as for `load_backbone`.

    Raises:
        ConfigError: there is none of this name, or it needs what is not there.
        ModelError: a local model cannot be loaded.
    """
    kind, _, model = text.partition(":")
    if text == "exact":
        from protokv.replay.judges.offline import ExactJudge

        return ExactJudge()
    if text == "f1":
        from protokv.replay.judges.offline import F1Judge

        return F1Judge()
    if kind == "openai" and model:
        from protokv.replay.judges.endpoint import EndpointJudge

        return EndpointJudge(model, cache)
    if kind == "local" and model:
        from protokv.backbones import load_backbone
        from protokv.replay.judges.local import LocalJudge

        return LocalJudge(load_backbone(model, **placement))
    raise ConfigError(f"there is no judge {text!r}", hint="use exact, f1, openai:MODEL or local:MODEL")
