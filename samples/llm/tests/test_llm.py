"""States as models of `llm`: which there are, and what they answer. The gate has a stand-in of the
package; docs/guides/agents.md says how the real one was tried.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest

from protokv.core.backbone import Backbone
from protokv.ingestion import ingest
from protokv.memories import DurableConfig
from protokv.stream.opening import load
from protokv.stream.session import Session
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The plug-in, in a stand-in of `llm`."""
    names = {"Model": object, "Options": pydantic.BaseModel, "hookimpl": lambda it: it}
    names |= {"ModelError": type("ModelError", (Exception,), {}), "user_dir": lambda: tmp_path}
    module = ModuleType("llm")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "llm", module)
    for name in ("talk", "monday/door"):
        path = tmp_path / f"protokv/{name}.safetensors"
        ingest(Prepared(1, 6), path, DurableConfig(budget=40), backbone=MockBackbone())
    (tmp_path / "protokv/talk.kv.safetensors").write_bytes(b"")
    (tmp_path / "protokv/.hidden.safetensors").write_bytes(b"")
    found = importlib.import_module("samples.llm.llm_protokv")
    yield found
    del sys.modules["samples.llm.llm_protokv"]


def list_models(plugin: Any) -> dict[str, Any]:
    found: list[Any] = []
    plugin.register_models(found.append)
    return {one.model_id: one for one in found}


def make_prompt(*said: str, system: str | None = None, **options: Any) -> Any:
    each = [("system", system)] if system else []
    each += [("user" if n % 2 == 0 else "assistant", text) for n, text in enumerate(said)]
    messages = [SimpleNamespace(role=role, parts=[SimpleNamespace(text=t)]) for role, t in each]
    known = {"choices": None, "at_s": None} | options
    return SimpleNamespace(messages=messages, options=SimpleNamespace(**known))


def answer(model: Any, prompt: Any) -> tuple[str, Any]:
    response = SimpleNamespace(set_usage=lambda **_: None)
    return "".join(model.execute(prompt, True, response, None)), response.response_json


def test_each_state_is_a_model_that_answers_as_a_session_with_the_turns_before(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone: Backbone = MockBackbone()
    monkeypatch.setattr("protokv.stream.opening.load_recorded_backbone", lambda *_, **__: backbone)
    monkeypatch.setattr("protokv.stream.asking.find_evidence", lambda *_: None)
    asked: list[Any] = []
    stream = Session.stream

    def spy(self: Session, question: str, *how: Any, **more: Any) -> Any:
        asked.append((question, more["turns"], more["system"]))
        return stream(self, question, *how, **more | {"turns": (), "system": None})

    monkeypatch.setattr(Session, "stream", spy)
    models = list_models(plugin)
    assert set(models) == {"protokv/talk", "protokv/monday/door"}
    model = models["protokv/talk"]
    text, told = answer(model, make_prompt("what", "red", "and then", system="be brief"))
    assert asked == [("and then", [("what", "red")], "be brief")]
    assert told["stream_time_s"] == 3.0
    assert text == "".join(stream(load(model.path, backbone), "and then"))
    chosen, told = answer(model, make_prompt("what", choices="red,green"))
    assert chosen == max(told["probabilities"], key=told["probabilities"].get)


def test_what_cannot_be_answered_is_an_error_of_llm_in_one_line(plugin: Any) -> None:
    model = list_models(plugin)["protokv/talk"]
    with pytest.raises(plugin.llm.ModelError, match="the state names the model mock"):
        answer(model, make_prompt("what"))
    model.path.write_bytes(b"no state")
    with pytest.raises(plugin.llm.ModelError, match=r"talk\.safetensors"):
        answer(model, make_prompt("what"))
