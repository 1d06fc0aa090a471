"""Families without a line of code of ours: pictures in steps give the logits and answers of all in
one call.

Then bytes are bounded. Configs are shrunk as they stand in transformers; a family that this version
lacks is skipped.
"""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

import protokv
from protokv.core.rotary import rotate
from protokv.core.tensors import TensorDict
from samples.families import make, read_defaults, try_family
from tests.backbones.test_cache import ANSWER, answer
from tests.conftest import widen

FAMILIES = [
    "glm4v",
    "glm46v",
    "minicpmv4_6",
    "minicpmv4_7",
    "lfm3_vl",
    "gemma4_unified",
    "cosmos3_omni",
    "exaone4_5",
    "nemotron_h_omni",
]
# Families whose processor tells which tokens are of a picture.
TYPED = ("glm4v", "glm46v", "minicpmv4_7", "gemma4_unified", "cosmos3_omni")
COUNT = 5


def tiny_model(family: str) -> Any:
    if family not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no such family")
    return make(read_defaults(CONFIG_MAPPING[family]), AutoModelForImageTextToText)


def make_steps(family: str, config: Any) -> list[TensorDict]:
    """Return steps of two words and a picture of 4 x 8 patches, as the processor of the family
    gives them.
    """
    tower = config.vision_config
    n = 32
    grid = torch.tensor([[4, 8]])
    tokens = n // 4
    sizes = {"image_grid_hw": grid}
    shape: tuple[int, ...] = (n, 3 * 4**2 * getattr(tower, "temporal_patch_size", 1))
    if family.startswith("minicpm"):
        tokens = n // 16
        shape = (1, 3, 4, n * 4)
        sizes = {"target_sizes": grid}
    elif family == "gemma4_unified":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(8))[None]
        tokens = n
        shape = (1, n, 3 * tower.model_patch_size**2)
        sizes = {"image_position_ids": places}
    elif family != "nemotron_h_omni":
        sizes = {"image_grid_thw": torch.tensor([[1, 4, 8]])}
    marks = [getattr(config, name, 9) for name in ("image_start_id", "image_end_id")]
    ids = torch.tensor([[10, 11, marks[0], *[config.image_token_id] * tokens, marks[1]]])
    sizes |= {"mm_token_type_ids": (ids == config.image_token_id).int()} if family in TYPED else {}
    return [{"input_ids": ids, "pixel_values": torch.rand(shape), **sizes} for _ in range(COUNT)]


@pytest.mark.parametrize("family", widen(FAMILIES, ["minicpmv4_7", "cosmos3_omni"]))
@torch.no_grad()
def test_a_family_without_code_of_ours_is_served(family: str) -> None:
    model = tiny_model(family)
    steps = make_steps(family, model.config)
    question = torch.randint(3, 90, (1, 7))
    along = {
        "input_ids": 1,
        "mm_token_type_ids": 1,
        "pixel_values": 3 if family.startswith("minicpm") else 0,
    }
    whole = {
        name: torch.cat([step[name] for step in steps], along.get(name, 0)) for name in steps[0]
    }
    expected = model(**whole).logits[0]
    whole["input_ids"] = torch.cat((whole["input_ids"], question), 1)
    if family in TYPED:
        whole["mm_token_type_ids"] = torch.nn.functional.pad(whole["mm_token_type_ids"], (0, 7))
    theirs = answer(model, whole)
    cache = protokv.Cache(model, memory="full")
    small = protokv.Cache(model, 24)
    sizes = []
    found = []
    asked = []
    for step in steps:
        asked.append(model(**cache.question(step)).logits[0])
        found.append(model(**cache.step(step)).logits[0])
        cache.commit()
    for logits in (asked, found):
        torch.testing.assert_close(torch.cat(logits), expected, atol=5e-4, rtol=5e-4)
    assert answer(model, cache.question({"input_ids": question})) == theirs
    for step in steps * 4:
        model(**small.step(step))
        small.commit()
        sizes.append(small.nbytes)
    # The window of sliding layers is full by then.
    assert sizes[-1] == sizes[-8]
    assert len(answer(model, small.question({"input_ids": question}))) == ANSWER["max_new_tokens"]


@torch.no_grad()
def test_a_model_that_pairs_neighbours_is_read_in_the_order_of_halves() -> None:
    from transformers.models.glm4v.modeling_glm4v import apply_rotary_pos_emb

    model = tiny_model("glm46v")
    decoder: Any = protokv.Cache(model, 24).decoder
    keys = torch.randn(1, 1, 5, 128)
    positions = torch.arange(5)[:, None].expand(-1, 3) + 100
    cos_and_sin = model.model.language_model.rotary_emb(keys, positions.T[:, None])
    theirs = apply_rotary_pos_emb(keys, keys, *cos_and_sin)[1]
    torch.testing.assert_close(
        decoder.to_halves(theirs), rotate(decoder.to_halves(keys), decoder.angles(positions))
    )


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llava", "served"),
        ("evolla", "served"),  # angles of an encoder inside the decoder come first
        ("kosmos-2", "served: its text decoder alone"),  # masks of all tokens so far
        ("paligemma", "refused: tokens of it see later ones"),
        ("blip-2", "served: its text decoder alone"),
        # Before transformers 5.24 its attention was its own.
        ("gptj", ("served", "refused: the attention of it cannot be set")),
        ("beam", "served"),  # full attention without angles beside sliding layers that have some
        ("gpt_oss", "refused: it hands its attention s_aux (sinks)"),
    ],
)
def test_the_table_of_families_says_why(family: str, said: str | tuple[str, ...]) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no such family")
    kind = CONFIG_MAPPING[family]
    pictures = kind in AutoModelForImageTextToText._model_mapping
    found = try_family(kind, AutoModelForImageTextToText if pictures else AutoModelForCausalLM)
    assert found.startswith(said)
