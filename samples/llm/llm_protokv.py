"""The states of a folder as models of `llm`: `llm -m protokv/talk "Who speaks?"`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llm
from pydantic import Field

from protokv.errors import ProtoKVError

_SUFFIX = ".safetensors"


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[[Any], None]) -> None:
    """Register a model for each state below LLM_PROTOKV_STATES, else `protokv/` in llm's folder."""
    folder = Path(os.environ.get("LLM_PROTOKV_STATES") or llm.user_dir() / "protokv")
    for path in sorted(folder.rglob(f"*{_SUFFIX}")):
        name = path.relative_to(folder).as_posix().removesuffix(_SUFFIX)
        if not name.endswith(".kv") and "/." not in f"/{name}":
            register(StateModel(name, path))


class StateModel(llm.Model):
    """A state, which answers from what it has watched."""

    can_stream = True

    class Options(llm.Options):
        """How to answer."""

        choices: str | None = Field(None, description="Answer with one of these: yes,no")
        at_s: float | None = Field(None, description="As of a kept commit, in seconds")

    def __init__(self, name: str, path: Path) -> None:
        self.model_id = f"protokv/{name}"
        self.path = path

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """Yield pieces of the answer; what it stood on is in the log: `llm logs --json`."""
        # These take long, and llm loads its plug-ins for every command.
        from protokv.state.reader import StateReader
        from protokv.state.sources import find_notice
        from protokv.stream.opening import open_session

        said = [(one.role, "\n".join(part.text for part in one.parts)) for one in prompt.messages]
        spoken = [text for role, text in said if role in ("user", "assistant")]
        try:
            reader = StateReader.open(self.path, at_s=prompt.options.at_s)
            session = open_session(reader, default=os.environ.get("PROTOKV_MODEL"))
            choices = tuple(filter(None, (prompt.options.choices or "").split(",")))
            pieces = session.stream(
                spoken[-1],
                replace(session.backbone.decoding, choices=choices),
                evidence=not session.outside,
                turns=list(zip(spoken[:-1:2], spoken[1::2], strict=True)),
                system="\n".join(text for role, text in said if role == "system") or None,
            )
            answer = yield from pieces
        except ProtoKVError as error:
            raise llm.ModelError(error.message) from None
        evidence = answer.evidence and [asdict(one) for one in answer.evidence.spans]
        response.response_json = {
            "stream_time_s": answer.stream_time_s,
            "probabilities": answer.probabilities,
            "evidence": evidence,
            "notice": find_notice(reader.header),
        }
        response.set_usage(input=answer.context_tokens, output=answer.tokens)
