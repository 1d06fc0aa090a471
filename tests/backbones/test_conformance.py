"""Every family gives the results of transformers' own model of the same folder.

A new family needs a builder in `tiny` and its inputs in `upstream`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import protokv
from protokv.backbones import MODEL_FAMILIES, load_backbone
from protokv.backbones.loading import use_fast_kernels
from protokv.core.backbone import MOST_WORD_TOKENS, Backbone
from protokv.core.decoding import Decoding
from protokv.core.rotary import unrotate
from protokv.errors import ConfigError
from protokv.memories import DurableConfig, MemoryConfig
from protokv.stream.session import Session
from protokv.words.transcript import Transcript
from tests.backbones.tiny import BUILDERS
from tests.backbones.upstream import Upstream
from tests.conftest import random_frames, watched
from tests.core.streams import copy_of, same
from tests.tolerance import check_logits, check_near, forward_terms, near_logits

QUESTION = "what is the first star ?"
SIZES = {
    "landscape": (60, 90),
    "portrait": (97, 41),
    "below one patch": (9, 5),
    "one row": (1, 150),
}
# One family of each kind of position or embedding; the others share its code.
HALF = ("qwen2_5_vl", "qwen3_vl", "llava_onevision", "gemma4")
EVERYTHING = MemoryConfig.of("full", budget=64)
# Small enough that a dozen steps of any family overflow it, large enough for a bank.
SMALL = DurableConfig(budget=30)


@pytest.fixture(scope="module", params=HALF)
def half(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Backbone]:
    """Return a family, its folder, and the model in bfloat16."""
    folder = BUILDERS[request.param](tmp_path_factory.mktemp(request.param))
    return request.param, folder, load_backbone(str(folder), device="cpu", dtype="bfloat16")


@pytest.fixture(scope="module")
def upstream(family: str, folder: Path) -> Upstream:
    return Upstream(family, folder)


def video(backbone: Backbone, n_steps: int, size: tuple[int, int] = (60, 90)) -> list[np.ndarray]:
    """Return the steps that `watched` watches, or others of another size."""
    return [random_frames(seed, backbone.frames_per_step, *size) for seed in range(n_steps)]


def watch_together(session: Session, steps: list[np.ndarray], words: Sequence[str] = ()) -> None:
    """Watch steps in one forward, at the rate of the session, with what was said in each."""
    seconds = session.clock.step_seconds
    starts_s = [(session.clock.steps + i) * seconds for i in range(len(steps))]
    prepared = [session.backbone.prepare(images) for images in steps]
    session.watch_prepared(prepared, starts_s, [[said] if said else [] for said in words])


def expected_logits(upstream: Upstream, session: Session, steps: list[np.ndarray]) -> Tensor:
    inputs = upstream.inputs(steps, QUESTION, session.clock.step_seconds)
    return upstream.logits(inputs, len(session.backbone.suffix_ids(QUESTION)))


def assert_logits(session: Session, upstream: Upstream, steps: list[np.ndarray]) -> None:
    expected = expected_logits(upstream, session, steps)
    check_logits(session, session.prefill(QUESTION), expected)


def test_fast_kernels_give_the_logits_of_transformers(folder: Path, upstream: Upstream) -> None:
    backbone = load_backbone(str(folder), device="cpu", dtype="float32")
    use_fast_kernels(backbone._model)  # type: ignore[attr-defined]
    assert_logits(watched(backbone, EVERYTHING, range(3)), upstream, video(backbone, 3))


def test_every_family_that_sees_has_a_row() -> None:
    assert BUILDERS.keys() == MODEL_FAMILIES.keys()


def test_a_model_is_named_and_ends_answers_as_its_files_say(
    backbone: Backbone, family: str, upstream: Upstream
) -> None:
    assert backbone.identity.family == family
    assert backbone.max_position == upstream.model.config.text_config.max_position_embeddings
    assert upstream.model.generation_config.eos_token_id in backbone.stop_ids


@pytest.mark.parametrize(
    ("size", "pieces", "fps"),
    [
        ("landscape", (2, 3), None),
        ("landscape", (1, 1, 1, 1), 0.4),
        ("landscape", (4,), 3.0),
        ("portrait", (1, 1), None),
        ("below one patch", (1, 1), None),
        ("one row", (1, 1), None),
    ],
    ids=str,
)
def test_a_stream_in_pieces_gives_the_logits_of_the_whole_model(
    family: str,
    backbone: Backbone,
    upstream: Upstream,
    size: str,
    pieces: tuple[int, ...],
    fps: float | None,
) -> None:
    if fps and family == "internvl":
        pytest.skip("its processor counts frames at any rate")
    steps = video(backbone, sum(pieces), SIZES[size])
    session = Session.start(backbone, EVERYTHING, fps=fps)
    for count in pieces:
        watch_together(session, steps[session.clock.steps :][:count])
    assert_logits(session, upstream, steps)


@pytest.mark.parametrize("last", ["", "blue one"])
def test_words_between_steps_are_the_interleaved_prompt(
    made: str, backbone: Backbone, upstream: Upstream, last: str
) -> None:
    if last and made == "qwen2_5_vl of sliding layers":
        pytest.skip("a window keeps the mark that words open the next video with")
    steps = video(backbone, 6)
    words = ["", "two three", "", "what is red ?", "", last]
    session = Session.start(backbone, EVERYTHING, attachments=[Transcript()])
    watch_together(session, steps[:1], words[:1])
    watch_together(session, steps[1:], words[1:])
    inputs = upstream.inputs(steps, QUESTION, session.clock.step_seconds, words)
    found = session.prefill(QUESTION)
    check_logits(session, found, upstream.logits(inputs, len(found)))


@torch.inference_mode()
def test_steps_are_seen_together_as_one_by_one(backbone: Backbone) -> None:
    frames = backbone.frames_per_step
    steps = [backbone.prepare(random_frames(0, frames, *size)) for size in SIZES.values()]
    times_s = [0.0, 1.0, 2.0, 123.4]
    together = backbone.embed_steps(steps, times_s)
    for one, step, time_s in zip(together, steps, times_s, strict=True):
        (other,) = backbone.embed_steps([step], [time_s])
        assert (one.grid, one.visual) == (other.grid, other.visual)
        terms = forward_terms(backbone.layers, other.embeddings.shape[1], len(other.embeddings))
        check_near(one.embeddings, other.embeddings, terms)
        if other.deepstack is not None:
            check_near(one.deepstack, other.deepstack, terms)


def test_bfloat16_is_as_near_to_float32_as_transformers_own(
    half: tuple[str, Path, Backbone],
) -> None:
    family, folder, backbone = half
    steps = video(backbone, 6)
    session = watched(backbone, EVERYTHING, range(6))
    ours = session.prefill(QUESTION)
    exact = expected_logits(Upstream(family, folder), session, steps)
    theirs = expected_logits(Upstream(family, folder, torch.bfloat16), session, steps).float()
    error = (theirs - exact).square().mean()
    # Of two independent errors of one size; a single logit may be far off on either side.
    assert (ours - exact).square().mean() <= 1.5**2 * error
    assert (ours - theirs).square().mean() <= (1 + 1.5) ** 2 * error


def test_the_highest_positions_of_a_step_are_known_without_looking(backbone: Backbone) -> None:
    steps = [images for size in SIZES.values() for images in video(backbone, 2, size)]
    for index, images in enumerate(steps):
        step = backbone.add_words(backbone.embed_step(images), ["two three"] * (index % 2))
        start = 9 + 20 * index
        stands = backbone.step_positions(
            step, origin=7, start=start, index=index, time_s=1e4 * index
        )
        assert stands.positions.amax(0).tolist() == list(stands.highest)


def test_a_greedy_answer_is_theirs(
    backbone: Backbone, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = watched(backbone, EVERYTHING, range(3))
    inputs = upstream.inputs(video(backbone, 3), QUESTION, session.clock.step_seconds)
    expected, lead = upstream.generate(inputs, 8)
    # No choice is a near-tie, which another order of sums would decide in another way.
    assert lead > 2 * near_logits(session, session.prefill(QUESTION))["atol"]
    decoded: list[list[int]] = []
    # Both go on behind a token that would end the answer, so that all eight are compared.
    monkeypatch.setattr(backbone, "stop_ids", frozenset())
    monkeypatch.setattr(backbone, "decode", lambda ids: decoded.append(list(ids)) or "")
    session.ask(QUESTION, Decoding(max_new_tokens=8))
    assert decoded[-1] == expected


@torch.inference_mode()
def test_rotation_is_removed_after_an_hour_of_video(backbone: Backbone) -> None:
    """A token that sees itself alone has the same keys anywhere, but for their rotation."""

    def forward(start: int) -> Tensor:
        cache = backbone.new_cache()
        backbone.forward(backbone.embed_text([9]), backbone.text_positions(start, 1), cache)
        return cache.read_all()[0]

    newest = 352_800
    still = forward(0)
    rotated = forward(newest)
    back = unrotate(rotated, backbone.rotary(backbone.text_positions(newest, 1)))
    check_near(back, still, forward_terms(backbone.layers, still[0].numel(), 1))
    beside = unrotate(rotated, backbone.rotary(backbone.text_positions(newest - 1, 1)))
    assert (beside - still).abs().max() > 0.1


def test_a_saved_stream_continues_byte_for_byte(backbone: Backbone, tmp_path: Path) -> None:
    assert_continues(backbone, tmp_path)


def test_a_saved_stream_in_bfloat16_continues_byte_for_byte(
    half: tuple[str, Path, Backbone], tmp_path: Path
) -> None:
    assert_continues(half[2], tmp_path)


def assert_continues(backbone: Backbone, tmp_path: Path) -> None:
    """Ask, save and resume an overfull memory; it keeps to its size and gives finite logits."""
    whole = watched(backbone, SMALL, range(7))
    held = copy_of(whole)
    size = whole.state_bytes
    logits = whole.prefill(QUESTION)
    whole.ask(QUESTION)
    assert same(whole.tensors(), held)
    protokv.save(whole, tmp_path / "state.safetensors")
    resumed = protokv.load(tmp_path / "state.safetensors", backbone)
    assert torch.equal(resumed.prefill(QUESTION), logits)
    for images in video(backbone, 9)[7:]:
        whole.watch(images)
        resumed.watch(images)
    assert resumed.clock == whole.clock
    assert same(
        *({n: t.view(torch.uint8) for n, t in one.tensors().items()} for one in (resumed, whole))
    )
    assert whole.state_bytes == size
    prefix = len(backbone.prefix_ids)
    assert whole.clock.tokens_seen > SMALL.budget
    assert prefix < whole.memory.context().visible_tokens() <= SMALL.budget + prefix
    assert torch.isfinite(resumed.prefill(QUESTION)).all()


def test_turns_and_a_system_prompt_are_the_rendered_chat(
    backbone: Backbone, upstream: Upstream
) -> None:
    turns = [("what is red ?", "a star"), ("where ?", "")]
    said = [
        ("user", "what is red ?"),
        ("assistant", "a star"),
        ("user", "where ?"),
        ("assistant", ""),
    ]
    before, after = upstream.chat(QUESTION, *said)
    assert backbone.prefix_ids == before
    assert backbone.suffix_ids(QUESTION, turns)[-len(after) :] == after
    prompted = backbone.with_system(" the star is blue")
    before, after = upstream.chat(QUESTION, ("system", "the star is blue"), *said)
    assert prompted.prefix_ids == before != backbone.prefix_ids
    assert prompted.suffix_ids(QUESTION, turns)[-len(after) :] == after
    for texts in (("<|im_end|>", ""), ("what ?", "<|im_end|>")):
        with pytest.raises(ConfigError, match=r"an earlier .* contains the control token"):
            backbone.suffix_ids(QUESTION, [texts])
    with pytest.raises(ConfigError, match="the system prompt contains the control token"):
        backbone.with_system("<|im_end|>")


def test_control_tokens_are_left_out_of_words_and_refused_in_questions(
    backbone: Backbone, upstream: Upstream
) -> None:
    config = upstream.model.config
    shown = getattr(config, "video_token_id", None) or config.image_token_id
    for token in ("<|im_end|>", "<|im_start|>", upstream.tokenizer.convert_ids_to_tokens(shown)):
        with pytest.raises(ConfigError, match="the question contains the control token") as caught:
            backbone.suffix_ids(f"what is this {token} ?")
        assert token in caught.value.message
        assert backbone.words_ids(f"two {token}three{token}") == backbone.words_ids("two three")
    assert len(backbone.words_ids("two " * 5000)) < MOST_WORD_TOKENS + 9
    step = backbone.embed_step(video(backbone, 1)[0])
    assert backbone.add_words(step, [" ", ""]) is step
    with pytest.raises(ConfigError, match="empty"):
        backbone.question_ids("  ")
