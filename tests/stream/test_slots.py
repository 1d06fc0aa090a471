"""The slots of a state, read by transformers' own attention, answer as the session does; what
chooses by the question is refused; a damaged file is found.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, DynamicCache

from protokv.backbones import load_backbone
from protokv.backbones.stream_cache import CACHE_ARGUMENT
from protokv.core.backbone import Backbone
from protokv.core.tensors import TensorDict
from protokv.errors import ConfigError, StateCorrupt, StateNotFound
from protokv.memories import MemoryConfig
from protokv.slots import SlotsFile
from protokv.state.reader import StateReader
from protokv.stream.session import Session
from protokv.stream.slots import (
    count_slots,
    digest_commit,
    export_slots,
    find_lead,
    make_slots,
)
from protokv.words.transcript import Transcript
from tests.backbones.tiny import BUILDERS
from tests.conftest import random_frames, watched, widen
from tests.tolerance import check_logits

QUESTION = "who is the star ?"
SERVED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "smolvlm", "internvl")
FIXED = ("durable", "paper", "continuity", "infinipot-v", "hermes", "dycoke", "last-frames")
OTHERS = ("first-tokens", "random", "sliding-window", "full")


@pytest.fixture(scope="module", params=widen(SERVED, ("qwen3_vl", "internvl")))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def read_plainly(model: Any, tensors: TensorDict, session: Session) -> torch.Tensor:
    """Return the logits of a question by transformers alone: its cache holds the slots, its mask
    their bias, and the question stands behind them.
    """
    cache = DynamicCache()
    ids, *_ = session.aim(session.backbone.question_ids(QUESTION)[0])
    lead, *_ = session.aim(find_lead(session))
    ids = ids[len(lead) :]
    N = tensors["keys"].shape[1]
    masks = []
    T = len(ids)
    groups = model.config.get_text_config().num_attention_heads // tensors["keys"].shape[2]
    for layer, (keys, values, bias) in enumerate(
        zip(tensors["keys"], tensors["values"], tensors["bias"], strict=True)
    ):
        cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        hidden = torch.full((T, T), -torch.inf).triu(1)
        seen = bias.T.clamp(min=-1e30).repeat_interleave(groups, 0)[:, None].expand(-1, T, -1)
        masks.append(torch.cat((seen, hidden.expand(len(seen), -1, -1)), -1)[None])
    language = model.get_decoder()
    for layer, mask in zip(language.layers, masks, strict=True):
        layer.self_attn.register_forward_pre_hook(
            lambda _, given, named, mask=mask: (given, named | {"attention_mask": mask}),
            with_kwargs=True,
        )
    where = torch.arange(N, N + T)[None]
    if hasattr(language.rotary_emb, "mrope_section"):
        where = where.expand(3, 1, -1)
    hidden = language(
        inputs_embeds=model.get_input_embeddings()(torch.tensor([ids])),
        position_ids=where,
        attention_mask=masks[0],
        **{CACHE_ARGUMENT: cache},
    ).last_hidden_state[0]
    for layer in language.layers:
        layer.self_attn._forward_pre_hooks.clear()
        layer.self_attn._forward_pre_hooks_with_kwargs.clear()
    found: torch.Tensor = model.get_output_embeddings()(hidden)
    return found


def check_slots(model: Any, session: Session) -> None:
    """A question behind the slots has the logits of the session."""
    found = read_plainly(model, make_slots(session), session)
    check_logits(session, found, session.prefill(QUESTION)[-len(found) :])


@pytest.mark.parametrize("positions", ["stream", "compact"])
@pytest.mark.parametrize("memory", ["durable", "sliding-window"])
def test_every_family_answers_from_slots_as_from_the_session(
    model: Any, backbone: Backbone, memory: str, positions: str
) -> None:
    config = MemoryConfig.of(memory, budget=41).with_fields({"positions": positions})
    session = watched(backbone, config, range(9))
    assert count_slots(session) < session.clock.tokens_seen
    check_slots(model, session)


@pytest.mark.parametrize("folder", ["qwen2_5_vl"], indirect=True, scope="module")
class TestEveryMemory:
    @pytest.mark.parametrize("memory", FIXED + OTHERS)
    def test_of_a_fixed_set_has_slots_with_the_same_answer(
        self, model: Any, backbone: Backbone, memory: str
    ) -> None:
        check_slots(model, watched(backbone, MemoryConfig.of(memory, budget=41), range(9)))

    def test_words_at_the_end_leave_out_what_they_opened(
        self, model: Any, backbone: Backbone
    ) -> None:
        session = Session.start(
            backbone, MemoryConfig.of("sliding-window", budget=41), attachments=[Transcript()]
        )
        for seed in range(6):
            session.watch(random_frames(seed), words=["red star"] if seed in (0, 5) else [])
        check_slots(model, session)

    def test_the_file_needs_no_weights_and_says_of_which_commit_it_is(
        self, folder: Path, backbone: Backbone, tmp_path: Path
    ) -> None:
        session = watched(backbone, MemoryConfig.of("durable", budget=41), range(9))
        path = tmp_path / "talk.safetensors"
        session.save(path)
        document = export_slots(path, tmp_path / "talk.kv.safetensors", backbone=str(folder))
        found = SlotsFile(tmp_path / "talk.kv.safetensors")
        found.verify()
        assert document["slots"] == found.head.slots == count_slots(session)
        assert found.head.biased
        assert found.head.weights_digest == backbone.identity.weights_digest
        for name, tensor in make_slots(session).items():
            for layer in range(found.layers):
                assert torch.equal(found.read(layer, name, 3, 17), tensor[layer, 3:17])
        assert found.head.commit == digest_commit(StateReader.open(path).state)

    def test_damage_is_found(self, folder: Path, backbone: Backbone, tmp_path: Path) -> None:
        session = watched(backbone, MemoryConfig.of("durable", budget=41), range(4))
        state = tmp_path / "talk.safetensors"
        path = tmp_path / "talk.kv.safetensors"
        session.save(state)
        export_slots(state, path, backbone=str(folder))
        whole = path.read_bytes()
        path.write_bytes(whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
        with pytest.raises(StateCorrupt, match="not those that were written"):
            SlotsFile(path).verify()
        for part in (b"", whole[:100], whole[:-3], state.read_bytes()):
            path.write_bytes(part)
            with pytest.raises(StateCorrupt, match="has no slots"):
                SlotsFile(path)
        with pytest.raises(StateNotFound):
            SlotsFile(tmp_path / "none.kv.safetensors")


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("qwen2_5_vl", MemoryConfig.of("rekv", budget=41), "rekv chooses by the question"),
        ("qwen2_5_vl", MemoryConfig.of("durable", budget=41, recent_frames=2), "read again"),
        ("qwen3_5", MemoryConfig.of("durable", budget=41), "without full attention"),
    ],
    ids=("by the question", "read again", "other layers"),
)
def test_what_has_no_fixed_slots_is_refused(
    family: str, config: MemoryConfig, said: str, tmp_path: Path
) -> None:
    backbone = load_backbone(str(BUILDERS[family](tmp_path)), device="cpu", dtype="float32")
    session = watched(backbone, config, range(3))
    with pytest.raises(ConfigError, match=said):
        make_slots(session)


def test_a_model_without_weights_has_the_prompts_and_angles_of_the_whole_one(
    folder: Path, backbone: Backbone
) -> None:
    bare = load_backbone(str(folder), device="meta", dtype="float32")
    assert bare.identity == backbone.identity
    assert bare.question_ids(QUESTION) == backbone.question_ids(QUESTION)
    assert bare.prefix_ids == backbone.prefix_ids
    assert bare.decoding == backbone.decoding
    where = torch.randint(0, 9999, (20, backbone.position_components))
    for ours, theirs in zip(bare.rotary(where), backbone.rotary(where), strict=True):
        assert torch.equal(ours, theirs)
