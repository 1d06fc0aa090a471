"""DyCoke: merging step by step equals the description of whole videos."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.core.memory import Memory
from protokv.core.step import StepTokens
from protokv.memories import DyCokeConfig, MemoryConfig
from protokv.testing.memories import build as built
from tests.conftest import random_frames, watched
from tests.core.streams import copy_of, shape_of


def video(seed: int, frames: int, tokens: int) -> Tensor:
    """Return features `[F, V, E]` that change slowly in some slots."""
    generator = torch.Generator().manual_seed(seed)
    change = torch.rand(tokens, 1, generator=generator) * torch.randn(
        frames, tokens, 6, generator=generator
    )
    return torch.randn(tokens, 6, generator=generator) + change.cumsum(0)


def merged_at_once(features: Tensor, share: float) -> list[list[int]]:
    """Apply the two passes to a whole video of a multiple of four frames; return the kept slots of
    each frame.
    """
    F, V, _ = features.shape
    n = max(1, int((1 - share) * V))

    def lowest(frame: Tensor, other: Tensor) -> list[int]:
        cosines = [
            float(torch.nn.functional.cosine_similarity(frame[v], other[v], dim=0))
            for v in range(V)
        ]
        return sorted(sorted(range(V), key=cosines.__getitem__)[:n])

    kept = [list(range(V)) for _ in range(F)]
    for i in range(0, F, 2):
        kept[i + 1] = lowest(features[i + 1], features[i])
    for i in range(0, F, 4):
        kept[i + 2] = lowest(features[i + 2], features[i])
    return kept


@given(
    st.integers(0, 99),
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.5, 0.7, 1.0]),
    st.integers(0, 9),
)
def test_merging_by_frames_is_merging_the_video(
    seed: int, groups: int, tokens: int, share: float, cut: int
) -> None:
    features = video(seed, 4 * groups, tokens)
    streamed = []
    memory, world = built(DyCokeConfig(merge_share=share), shape_of())
    memory.start(*world.sink())
    # A caller may use one buffer for all frames.
    buffer = torch.empty_like(features[0])
    for index, frame in enumerate(features):
        if index == cut:
            saved, (memory, _) = copy_of(memory), built(DyCokeConfig(merge_share=share), shape_of())
            memory.load(saved)
        streamed.append(select(memory, buffer.copy_(frame), (1, tokens)).tolist())
    assert streamed == merged_at_once(features, share)


def select(memory: Memory, frame: Tensor, grid: tuple[int, int]) -> Tensor:
    """The tokens that a memory selects; it never takes all without a choice."""
    found = memory.select(frame, grid)
    assert found is not None
    return found


def test_a_step_on_another_grid_is_whole_and_starts_a_group() -> None:
    memory, _ = built(DyCokeConfig(merge_share=0.5), shape_of())
    grids = [(2, 4), (2, 4), (4, 2), (4, 2), (4, 2), (4, 2), (2, 4)]
    kept = [
        len(select(memory, frame, grid)) for frame, grid in zip(video(1, 7, 8), grids, strict=True)
    ]
    assert kept == [8, 4, 8, 4, 4, 4, 8]


@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4, 5], [1, 4], [5]])
def test_a_thinned_step_keeps_its_text_and_the_rows_that_go_with_its_tokens(
    kept: list[int],
) -> None:
    embeddings = torch.arange(9.0)[:, None].repeat(1, 4)
    deepstack = torch.arange(6.0)[None, :, None].repeat(3, 1, 4)
    step = StepTokens(embeddings, (2, 3), slice(2, 8), deepstack)
    left, rows = step.select(torch.tensor(kept))
    assert rows.tolist() == [0, 1, *(2 + slot for slot in kept), 8]
    assert left.embeddings[:, 0].tolist() == rows.tolist()
    assert left.visual is not None
    assert left.embeddings[left.visual, 0].tolist() == [2.0 + slot for slot in kept]
    assert left.deepstack is not None
    assert left.deepstack[1, :, 0].tolist() == [float(slot) for slot in kept]


def test_a_session_forwards_what_was_selected_and_its_clock_counts_what_streamed_in(
    tiny: Backbone,
) -> None:
    session = watched(tiny, MemoryConfig.of("dycoke", budget=400, merge_share=0.5), range(6))
    plain = watched(tiny, MemoryConfig.of("sliding-window", budget=400), range(6))
    assert session.clock == plain.clock
    tokens = [tiny.embed_step(random_frames(i), float(i)) for i in range(6)]
    V = len(tokens[0].embeddings)
    oracle, _ = built(DyCokeConfig(merge_share=0.5), shape_of())
    kept = [select(oracle, step.embeddings, step.grid) for step in tokens]
    assert [len(slots) for slots in kept] == [V, V // 2, V // 2, V // 2, V, V // 2]
    rows = torch.cat([index * V + slots for index, slots in enumerate(kept)])
    held = session.tensors()
    all_ = plain.tensors()
    for name in ("near.positions", "near.coordinates", "near.step"):
        assert torch.equal(held[name][: len(rows)], all_[name][rows])
    # The first step is whole and has the keys of the plain one; later ones have seen less.
    assert torch.equal(held["near.keys"][:, :, :V], all_["near.keys"][:, :, :V])
    assert int((held["near.step"] >= 0).sum()) == len(rows)
