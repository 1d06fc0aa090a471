"""What only one family has: its text around a step, its positions, its sizes and its settings of
frames.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from protokv.backbones import load_backbone
from protokv.backbones.chat import PromptTemplate
from protokv.backbones.qwen_vl import QwenVL
from protokv.backbones.smolvlm import SmolVLM
from protokv.core.backbone import Backbone
from protokv.core.step import StepTokens, StreamClock
from protokv.errors import ConfigError, ModelError
from protokv.memories import MemoryConfig
from protokv.stream.session import Session
from protokv.texts import JsonObject, Keywords
from protokv.words.transcript import Transcript
from tests.backbones.test_conformance import QUESTION, assert_logits, video
from tests.backbones.tiny import BUILDERS, LLAVA_SPECIAL, QWEN_TEMPLATE, write_tokenizer
from tests.backbones.upstream import Upstream
from tests.conftest import random_frames


def load(folder: Path) -> Backbone:
    return load_backbone(str(folder), device="cpu", dtype="float32")


def assert_equals_the_whole_model(
    family: str,
    folder: Path,
    count: int,
    fps: float | None = None,
    size: tuple[int, int] = (60, 90),
) -> None:
    session = Session.start(load(folder), MemoryConfig.of("full", budget=64), fps=fps)
    steps = video(session.backbone, count, size)
    for images in steps:
        session.watch(images)
    assert_logits(session, Upstream(family, folder), steps)


@pytest.mark.parametrize(
    ("family", "made", "count", "fps"),
    [
        *(("qwen3_vl", {}, 4, fps) for fps in (0.5, 1.0, 3.0)),
        *(("smolvlm", {}, 4, fps) for fps in (0.4, 3.0)),
        # So many frames that a number has two digits.
        ("internvl", {"language": "qwen3"}, 11, None),
        ("llava_onevision", {"feature_layer": [0, -2, -1]}, 3, None),
        (
            "llava_onevision",
            {"tower": "clip_vision_model", "select": "default", "feature_layer": -2},
            3,
            None,
        ),
    ],
    ids=str,
)
def test_at_any_rate_and_with_any_tower_the_logits_are_those_of_the_whole_model(
    tmp_path: Path, family: str, made: Keywords, count: int, fps: float | None
) -> None:
    assert_equals_the_whole_model(family, BUILDERS[family](tmp_path, **made), count, fps)


@pytest.mark.parametrize(
    ("family", "made", "side", "settings"),
    [
        ("smolvlm", {"image_size": 512, "patch": 16, "scale": 4}, 8, {"frame_side": 512}),
        ("smolvlm", {"image_size": 384, "patch": 14, "scale": 3}, 9, {"frame_side": 384}),
        ("internvl", {"image_size": 448, "patch": 14}, 16, {"frame_side": 448}),
        ("llava_onevision", {"image_size": 384}, 14, {"frame_height": 384, "frame_width": 384}),
    ],
    ids=["SmolVLM2 256M and 500M", "SmolVLM2 2.2B", "InternVL", "LLaVA-OneVision"],
)
def test_at_the_published_sizes_a_frame_has_the_published_tokens(
    tmp_path: Path, family: str, made: dict[str, int], side: int, settings: dict[str, int]
) -> None:
    folder = BUILDERS[family](tmp_path, **made)
    backbone = load(folder)
    tokens = backbone.embed_step(random_frames(0, 1, 90, 160))
    start, stop, _ = (tokens.visual or slice(None)).indices(len(tokens))
    assert (tokens.grid, stop - start) == ((side, side), side**2)
    assert settings.items() <= backbone.settings.items()
    assert backbone.settings["frame_tokens"] == side**2
    if family == "llava_onevision":
        assert (backbone.default_fps, backbone.frames_per_step) == (0.5, 1)
        assert_equals_the_whole_model(family, folder, 2, None, (360, 640))


SMOL = "<fake_token_around_image><global-img><fake_token_around_image>"


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3_vl", {0.25: "< 0 . 2 seconds > <|vision_start|> <|vision_end|>"}),
        (
            "smolvlm",
            {
                t: f"\nFrame from {at}:{SMOL}"
                for t, at in ((0, "00:00"), (61.9, "01:01"), (6000, "100:00"))
            },
        ),
        (
            "internvl",
            {
                t: f"{line}: <img></img>"
                for t, line in (
                    (0, "Frame1"),
                    (0.5, "\nFrame1"),
                    (9, "\nFrame10"),
                    (3600, "\nFrame3601"),
                )
            },
        ),
    ],
    ids=[
        "the mean time to a tenth",
        "minutes and seconds however late",
        "the number at the default rate",
    ],
)
def test_a_step_says_when_it_is(tmp_path: Path, family: str, said: dict[float, str]) -> None:
    folder = BUILDERS[family](tmp_path)
    backbone = load(folder)
    tokenizer = Upstream(family, folder).tokenizer
    names = {
        backbone.embed_text([i])[0].numpy().tobytes(): name
        for name, i in tokenizer.get_vocab().items()
    }
    for time_s, line in said.items():
        tokens = backbone.embed_step(random_frames(0, backbone.frames_per_step), float(time_s))
        assert tokens.visual is not None
        text = torch.cat(
            (tokens.embeddings[: tokens.visual.start], tokens.embeddings[tokens.visual.stop :])
        )
        assert (
            tokenizer.convert_tokens_to_string([names[row.numpy().tobytes()] for row in text])
            == line
        )


def test_the_time_of_a_step_is_the_mean_over_its_frames(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.start(tiny, MemoryConfig.of("full"), fps=4.0)
    times = []
    embed = tiny.embed_steps
    monkeypatch.setattr(tiny, "embed_steps", lambda steps, at: times.extend(at) or embed(steps, at))
    # Another picture each time, as one that stays is embedded once.
    for picture, time_s in enumerate((None, None, 100.0)):
        session.watch(random_frames(picture), time_s=time_s)
    assert times == [0.125, 0.625, 100.125]


def test_a_position_of_qwen3_vl_tells_the_step_that_stands_there(tmp_path: Path) -> None:
    backbone = load(BUILDERS["qwen3_vl"](tmp_path))
    origin = start = len(backbone.prefix_ids)
    places = []
    for index in range(4):
        tokens = backbone.embed_step(random_frames(index), 2.0 * index + 0.5)
        stands = backbone.step_positions(
            tokens, origin=origin, start=start, index=index, time_s=2.0 * index
        )
        start = max(stands.highest) + 1
        places.append(stands.positions)
    clock = StreamClock(4, 8.0, start, 4, 1.0, 2)
    for index, where in enumerate(places):
        assert ((backbone.stream_times(where, clock) / 2).floor() == index).all()


def grid_of(rows: int, columns: int) -> StepTokens:
    return StepTokens(torch.zeros(rows * columns, 1), (rows, columns))


def test_qwen2_vl_counts_steps_whatever_their_time(tmp_path: Path) -> None:
    backbone = load(BUILDERS["qwen2_vl"](tmp_path))
    positions = backbone.step_positions(
        grid_of(1, 2), origin=5, start=9, index=3, time_s=77.0
    ).positions
    assert positions.tolist() == [[8, 5, 5], [8, 5, 6]]


def test_positions_at_an_awkward_rate_are_those_of_transformers(
    tiny: Backbone, tiny_folder: Path
) -> None:
    theirs = Upstream("qwen2_5_vl", tiny_folder).model.model.get_vision_position_ids(
        5, torch.tensor([7, 4, 6]), 1, 2, 2 * (2 / 3.0)
    )
    place = partial(tiny.step_positions, grid_of(2, 3), origin=5, start=5)
    ours = torch.cat([place(index=i, time_s=i * 2 / 3.0).positions for i in range(7)])
    assert ours.T.tolist() == theirs.tolist()


def test_words_behind_steps_of_qwen2_5_vl_stand_where_transformers_puts_them(
    tiny: Backbone, tiny_folder: Path
) -> None:
    upstream = Upstream("qwen2_5_vl", tiny_folder).model
    session = Session.start(tiny, MemoryConfig.of("full", budget=64), attachments=[Transcript()])
    ids = list(tiny.prefix_ids)
    found = []
    shown = upstream.config.video_token_id
    for said in ("two three", "", "red"):
        step = tiny.add_words(session.embed(random_frames(0), float(session.clock.steps)), [said])
        found.append(session.position_steps([step], [float(session.clock.steps)])[0].positions)
        session.take([step], [float(session.clock.steps)])
        ids += [shown] * (len(step) - step.words) + (tiny.words_ids(said) if said else [])
    video = torch.tensor([ids]) == shown
    grid = torch.tensor([[1, 4, 6], [2, 4, 6]])
    theirs, _ = upstream.model.get_rope_index(
        torch.tensor([ids]), 2 * video.int(), video_grid_thw=grid
    )
    assert torch.cat(found).tolist() == theirs[:, 0, len(tiny.prefix_ids) :].T.tolist()


def test_a_control_token_without_a_role_in_the_tokenizer_is_refused_too(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_tokens(
        [AddedToken("<clip>", special=True), AddedToken("blue-green", special=False)]
    )
    assert "<clip>" not in tokenizer.all_special_tokens
    prompt = PromptTemplate(tokenizer, QwenVL.video_token)
    with pytest.raises(ConfigError, match="control token <clip>"):
        prompt.suffix_ids("what is <clip> ?")
    assert prompt.suffix_ids("what is blue-green ?")


ASKED = "{{ messages[0]['content'][1]['text'] }}"


@pytest.mark.parametrize("template", [f"{ASKED}<|video_pad|>", ASKED, "<|video_pad|>"])
def test_a_template_without_a_video_and_a_question_behind_it_is_refused(
    tiny_folder: Path, template: str
) -> None:
    with pytest.raises(ModelError, match=r"shows no <\|video_pad\|> followed by the question"):
        PromptTemplate(AutoTokenizer.from_pretrained(tiny_folder), QwenVL.video_token, template)


def test_the_processors_older_template_comes_before_that_of_a_text_only_tokenizer(
    tmp_path: Path,
) -> None:
    folder = BUILDERS["llava_onevision"](tmp_path / "new")
    newer = load(folder)
    copy = shutil.copytree(folder, tmp_path / "old")
    template = (copy / "chat_template.jinja").read_text()
    write_tokenizer(copy, LLAVA_SPECIAL, None)
    (copy / "chat_template.jinja").unlink()
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": QWEN_TEMPLATE})
    )
    older = load(copy)
    assert (older.prefix_ids, older.suffix_ids(QUESTION)) == (
        newer.prefix_ids,
        newer.suffix_ids(QUESTION),
    )
    for images, said in (
        (random_frames(0, 2), r"\[2, 60, 90, 3\] uint8"),
        (random_frames(0, 1)[..., :1], r"\[1, 60, 90, 1\] uint8"),
        (random_frames(0, 1)[0], r"\[60, 90, 3\] uint8"),
        (random_frames(0, 1) / 255, r"\[1, 60, 90, 3\] float64"),
        (random_frames(0, 1)[:, :0], r"\[1, 0, 90, 3\] uint8"),
    ):
        with pytest.raises(
            ValueError, match=rf"a step is \[1, height, width, 3\] uint8 RGB, got {said}"
        ):
            newer.embed_step(np.asarray(images))


def test_the_config_of_llava_onevision_names_the_placeholder_of_its_template(
    tmp_path: Path,
) -> None:
    folder = BUILDERS["llava_onevision"](tmp_path)
    usual = load(folder)
    template = folder / "chat_template.jinja"
    settings = folder / "config.json"
    template.write_text(template.read_text().replace("<video>", "<image>"))
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps(config | {"video_token_index": config["image_token_index"]}))
    other = load(folder)
    assert (other.prefix_ids, other.suffix_ids(QUESTION)) == (
        usual.prefix_ids,
        usual.suffix_ids(QUESTION),
    )


def test_frames_of_smolvlm_have_the_size_for_video_where_a_file_has_one() -> None:
    square = {"max_image_size": {"longest_edge": 512}}
    still = square | {"size": {"longest_edge": 2048}}
    sampling = still | {
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 384}}
    }
    rows: list[tuple[JsonObject, bool, int]] = [
        (sampling, False, 384),
        (sampling, True, 384),
        (still, False, 512),
        (still, True, 2048),
        ({}, False, 364),
    ]
    for raw, of_video, size in rows:
        frames = SmolVLM.make_frames(raw, of_video)
        assert (frames.size["longest_edge"], frames.do_image_splitting) == (size, False)
        assert frames.resample == SmolVLMImageProcessorPil.resample
