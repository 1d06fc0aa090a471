"""Sessions on disk: a session that was saved and loaded on the way ends in the same bytes."""

from dataclasses import replace
from pathlib import Path

import pytest

from protokv.core.backbone import Backbone
from protokv.errors import StateCorrupt, StateMismatch
from protokv.memories import DurableConfig, MemoryConfig, PaperConfig
from protokv.state.checkpoint import check_state_fits
from protokv.stream.opening import load, save
from protokv.stream.session import Session
from protokv.texts import JsonObject
from tests.conftest import random_frames, watched

CONFIGS = {
    "paper": PaperConfig(budget=40),
    "durable": DurableConfig(budget=40),
    "sliding-window": MemoryConfig.of("sliding-window", budget=40),
    "full": MemoryConfig.of("full", budget=40),
}


def go_on(session: Session, first: int, last: int) -> Session:
    for step in range(first, last):
        session.watch(random_frames(step))
    return session


@pytest.mark.parametrize("name", CONFIGS)
def test_saving_and_loading_on_the_way_gives_the_same_bytes(
    tiny: Backbone, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, half, both = (tmp_path / f"{part}.safetensors" for part in ("whole", "half", "both"))
    save(watched(tiny, CONFIGS[name], range(16)), whole)
    session = watched(tiny, CONFIGS[name], [])
    for start, stop in ((0, 1), (1, 9)):
        save(go_on(session, start, stop), half)
        with monkeypatch.context() as loading:
            loading.setattr(
                tiny, "forward", lambda *_, **__: pytest.fail("the prompt is in the state already")
            )
            loaded = load(half, tiny)
        save(go_on(loaded, stop, 16), both)
        assert both.read_bytes() == whole.read_bytes(), stop


@pytest.mark.parametrize(
    ("field", "change", "named"),
    [
        ("memory", {"budget": -1}, "budget"),
        ("memory", {"budget": 20}, r"near\.keys"),
        ("clock", {"next_position": 0}, "clock"),
    ],
    ids=["settings without sense", "tensors of other settings", "clock of another model"],
)
def test_a_header_that_contradicts_itself_or_the_tensors_is_corrupt(
    field: str, change: JsonObject, named: str, tiny: Backbone
) -> None:
    state = watched(tiny, CONFIGS["durable"], range(3)).make_state()
    if field == "memory":
        state = replace(state, memory={**state.memory, **change})
    else:
        state = replace(state, clock=replace(state.clock, **change))
    with pytest.raises(StateCorrupt, match=named):
        Session.restore(state, tiny)


@pytest.mark.parametrize("name", ["family", "config_hash", "dtype", "weights_digest"])
def test_a_state_of_another_model_is_refused_with_the_field_and_both_values(
    name: str, tiny: Backbone
) -> None:
    state = watched(tiny, CONFIGS["durable"], range(1)).make_state()
    other = replace(state.backbone, **{name: "other"})
    saved = getattr(state.backbone, name)
    with pytest.raises(
        StateMismatch, match=f"backbone.{name} is '{saved[:24]}', here it is 'other'"
    ):
        check_state_fits(state, other)
    check_state_fits(state, replace(state.backbone, name="moved/elsewhere"))
