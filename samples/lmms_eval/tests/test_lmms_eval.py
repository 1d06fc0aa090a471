"""Answers for another harness: one pass a video, no frame behind the time, and the same text as a
session gives.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from protokv.core.decoding import Decoding
from protokv.errors import ConfigError
from protokv.memories import DurableConfig
from protokv.stream.session import Session
from protokv.video import open_source, read_steps
from samples.lmms_eval.protokv_lmms_eval.answerer import Answerer
from tests.replay.benchmarks.miniature import LENGTH_S, write_clips

SHORT = Decoding(max_new_tokens=4)
QUESTIONS = ("What shape appeared first?", "What color was the star?")
lmms_eval = pytest.mark.skipif(
    importlib.util.find_spec("protokv_lmms_eval") is None,
    reason="the plugin is not installed: pip install samples/lmms_eval",
)


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer("protokv/mini", memory="durable", budget=90, device="cpu")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_clips(tmp_path_factory.mktemp("clips"))


def test_answers_about_one_video_share_one_pass_and_are_what_a_session_says(
    answerer: Answerer, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []
    watch = Session.watch

    def spy(self: Session, images: object, time_s: float) -> None:
        taken.append(time_s)
        watch(self, images, time_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "watch", spy)
    got = [answerer.answer(clips[0], text, until_s=10.0, decoding=SHORT) for text in QUESTIONS]
    whole = answerer.answer(clips[0], QUESTIONS[0], decoding=SHORT)
    assert taken == [float(second) for second in range(LENGTH_S)]
    session = Session.start(answerer.backbone, DurableConfig(budget=90))
    with open_source(clips[0]) as source:
        for step in read_steps(source, 2.0, 2):
            if step.time_s + 0.5 <= 10.0:
                watch(session, step.images, step.time_s)
    assert got == [session.ask(text, SHORT).text for text in QUESTIONS]
    assert whole
    # An earlier time begins again, since what was seen cannot be unseen.
    answerer.answer(clips[0], QUESTIONS[0], until_s=2.0, decoding=SHORT)
    assert taken[LENGTH_S:] == [0.0, 1.0]


def request(clip: Path, question: str, until_s: float | None, **options: object) -> SimpleNamespace:
    video = {"type": "video", "url": str(clip)} | ({} if until_s is None else {"end_time": until_s})
    message = {"role": "user", "content": [video, {"type": "text", "text": question}]}
    return SimpleNamespace(args=("", lambda doc: [message], options, 0, "shapes", "test"))


@pytest.mark.filterwarnings("ignore")
@lmms_eval
def test_the_plugin_is_found_and_gives_the_same_answers(
    answerer: Answerer, clips: list[Path]
) -> None:
    from lmms_eval.models.registry_v2 import ModelRegistryV2
    from protokv_lmms_eval.plugin import MANIFEST

    registry = ModelRegistryV2()
    registry.register_manifest(MANIFEST)
    model = registry.get_model_class("protokv")(
        model="protokv/mini", memory="durable", budget=90, device="cpu"
    )
    model.task_dict = {"shapes": {"test": [{}]}}
    questions = [(clip, text, at) for clip in clips for at in (10.0, None) for text in QUESTIONS]
    requests = [
        request(clip, text, at, max_new_tokens=4, until=["\n\n"]) for clip, text, at in questions
    ]
    # Not in order of time.
    given = model.generate_until(requests[::-1])[::-1]
    assert given == [
        answerer.answer(clip, text, until_s=at, decoding=SHORT) for clip, text, at in questions
    ]
    pictured = request(clips[0], "What is it?", None)
    pictured.args[1](None)[0]["content"][0]["type"] = "image"
    with pytest.raises(ConfigError, match="other than a video"):
        model.generate_until([pictured])


@pytest.mark.filterwarnings("ignore")
@lmms_eval
def test_an_installed_package_names_the_plugin() -> None:
    (found,) = (
        point for point in entry_points(group="lmms_eval.models") if point.name == "protokv"
    )
    assert found.value == "protokv_lmms_eval.plugin:MANIFEST"
