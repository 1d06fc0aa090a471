"""DyCoke: merging step by step equals the description of whole videos; pruning equals a literal computation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.core.build import build_memory
from protokv.core.compact import compact_context
from protokv.core.decoding import Decoding
from protokv.core.memory import Memory
from protokv.core.step import StepTokens
from protokv.core.tensors import MemoryShape
from protokv.memories import DyCokeConfig, DyCokeDecodeConfig, MemoryConfig
from tests.conftest import random_frames
from tests.core.streams import World, anchored, copy_of, feed, shape_of, shown_to
from tests.memories.conftest import watched

QUESTION = "what is the first star ?"


def built(config: MemoryConfig, shape: MemoryShape, seed: int = 0) -> tuple[Memory, World]:
    world = World(shape, seed)
    return build_memory(config, shape, world.rotary), world


def video(seed: int, frames: int, tokens: int) -> Tensor:
    """Return features `[F, V, E]` that change slowly in some slots."""
    generator = torch.Generator().manual_seed(seed)
    change = torch.rand(tokens, 1, generator=generator) * torch.randn(frames, tokens, 6, generator=generator)
    return torch.randn(tokens, 6, generator=generator) + change.cumsum(0)


def merged_at_once(features: Tensor, share: float) -> list[list[int]]:
    """Apply the two passes to a whole video of a multiple of four frames; return the kept slots of each frame."""
    F, V, _ = features.shape
    n = max(1, int((1 - share) * V))

    def lowest(frame: Tensor, other: Tensor) -> list[int]:
        cosines = [float(torch.nn.functional.cosine_similarity(frame[v], other[v], dim=0)) for v in range(V)]
        return sorted(sorted(range(V), key=cosines.__getitem__)[:n])

    kept = [list(range(V)) for _ in range(F)]
    for i in range(0, F, 2):
        kept[i + 1] = lowest(features[i + 1], features[i])
    for i in range(0, F, 4):
        kept[i + 2] = lowest(features[i + 2], features[i])
    return kept


@given(
    st.integers(0, 99), st.integers(1, 4), st.integers(1, 30), st.sampled_from([0.0, 0.5, 0.7, 1.0]), st.integers(0, 9)
)
def test_merging_frame_by_frame_across_a_saved_state_is_merging_the_whole_video(
    seed: int, groups: int, tokens: int, share: float, cut: int
) -> None:
    features, streamed = video(seed, 4 * groups, tokens), []
    memory, world = built(DyCokeConfig(merge_share=share), shape_of())
    memory.start(*world.sink())
    # A caller may use one buffer for all frames.
    buffer = torch.empty_like(features[0])
    for index, frame in enumerate(features):
        if index == cut:
            saved, (memory, _) = copy_of(memory), built(DyCokeConfig(merge_share=share), shape_of())
            memory.load(saved)
        streamed.append(memory.select(buffer.copy_(frame), (1, tokens)).tolist())
    assert streamed == merged_at_once(features, share)


def test_four_frames_of_196_tokens_leave_370_as_published() -> None:
    memory, _ = built(DyCokeConfig(), shape_of())
    kept = [len(memory.select(frame, (14, 14))) for frame in video(0, 8, 196)]
    assert kept == [196, 58, 58, 58] * 2


def test_a_step_on_another_grid_is_whole_and_starts_a_group() -> None:
    memory, _ = built(DyCokeConfig(merge_share=0.5), shape_of())
    grids = [(2, 4), (2, 4), (4, 2), (4, 2), (4, 2), (4, 2), (2, 4)]
    kept = [len(memory.select(frame, grid)) for frame, grid in zip(video(1, 7, 8), grids, strict=True)]
    assert kept == [8, 4, 8, 4, 4, 4, 8]


def test_the_features_that_are_kept_are_those_of_one_step() -> None:
    memory, world = built(DyCokeConfig(budget=20), shape_of())
    memory.start(*world.sink())
    sizes = []
    for frame in video(0, 12, 12):
        # In any memory layout.
        memory.select(frame.T.contiguous().T, (3, 4))
        assert memory.tensors()["merge.reference"].is_contiguous()
        sizes.append(memory.nbytes())
    assert sizes[0]["merge"] == 12 * 6 * 4 + 3 * 8
    assert all(size == sizes[0] for size in sizes)


@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4, 5], [1, 4], [5]])
def test_a_thinned_step_keeps_its_text_and_the_rows_that_go_with_its_tokens(kept: list[int]) -> None:
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


def test_a_session_forwards_what_was_selected_and_its_clock_counts_what_streamed_in(tiny: Backbone) -> None:
    session = watched(tiny, MemoryConfig.of("dycoke", budget=400, merge_share=0.5), range(6))
    plain = watched(tiny, MemoryConfig.of("sliding-window", budget=400), range(6))
    assert session.clock == plain.clock
    tokens = [tiny.embed_step(random_frames(i), float(i)) for i in range(6)]
    V = len(tokens[0].embeddings)
    oracle, _ = built(DyCokeConfig(merge_share=0.5), shape_of())
    kept = [oracle.select(step.embeddings, step.grid) for step in tokens]
    assert [len(slots) for slots in kept] == [V, V // 2, V // 2, V // 2, V, V // 2]
    rows = torch.cat([index * V + slots for index, slots in enumerate(kept)])
    held, all_ = session.tensors(), plain.tensors()
    for name in ("near.positions", "near.coordinates", "near.step"):
        assert torch.equal(held[name][: len(rows)], all_[name][rows])
    # The first step is whole and has the keys of the plain one; later ones have seen less.
    assert torch.equal(held["near.keys"][:, :, :V], all_["near.keys"][:, :, :V])
    assert int((held["near.step"] >= 0).sum()) == len(rows)


def literal_pruning(steps: list[Tensor], keys: Tensor, sink: Tensor, share: float) -> tuple[list[list[int]], int]:
    """Return the visual tokens that pruned layers read at each decode step, and the number of choices.

    Args:
        steps: the deciding layer's query of each decode step, `[Hq, T, D]`.
        keys: `[H, n, D]` of the visual tokens in that layer.
        sink: `[H, P0, D]`.
        share: p.
    """
    H, n, D = keys.shape
    chosen: list[list[int]] = []
    before: list[float] | None = None
    times = 0
    for query in steps:
        attention = [0.0] * n
        for h in range(len(query)):
            kv = h // (len(query) // H)
            every = torch.cat((sink[kv], keys[kv])) @ query[h, -1] / math.sqrt(D)
            weights = torch.exp(every - every.max())
            for token in range(n):
                attention[token] += float(weights[sink.shape[1] + token] / weights.sum()) / len(query)
        dot = sum(a * b for a, b in zip(attention, before or [0.0] * n, strict=True))
        norms = math.hypot(*attention) * math.hypot(*(before or [1.0]))
        if before is None or dot / norms < 0.9:
            times += 1
            best = sorted(range(n), key=lambda token: -attention[token])[: int(n * (1 - share))]
            chosen.append(sorted(best))
        else:
            chosen.append(chosen[-1])
        before = attention
    return chosen, times


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.sampled_from([0.0, 0.1, 3.0]), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.7, 0.8]),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(0, 99),
)
def test_decode_steps_read_what_a_literal_computation_chooses(
    lengths: list[int], changes: list[float], share: float, first: int, groups: int, seed: int
) -> None:
    shape = shape_of(layers=4, heads=2, sink=3)
    config = DyCokeDecodeConfig(budget=8, prune_share=share, first_pruned_layer=first)
    memory, world = built(config, shape, seed)
    steps = feed(memory, world, lengths)
    keys, values = (torch.cat([getattr(step, name) for step in steps], 2) for name in ("keys", "values"))
    n = sum(lengths)
    context = memory.recall()
    generator = torch.Generator().manual_seed(seed)
    size = (4, 2 * groups, 2, 8)
    query = torch.randn(size, generator=generator)
    for layer in range(4):
        read = shown_to(context, layer, query[layer])
        whole = shown_to(memory.context(), layer, query[layer])
        assert all(torch.equal(a, b) for a, b in zip(read, whole, strict=True))
    sink = memory.tensors()["sink.keys"]
    decoded, shown = [], []
    for change in changes:
        query = query + change * torch.randn(size, generator=generator)
        decoded.append(query[first - 1])
        shown.append([shown_to(context, layer, query[layer]) for layer in range(4)])
    expected, _ = literal_pruning(decoded, keys[first - 1], sink[first - 1], share)
    for rows, layers in zip(expected, shown, strict=True):
        for layer, (k, v, bias) in enumerate(layers):
            if layer < first:
                assert k.shape[1] >= 3 + n
                assert int((bias[0] == 0).sum()) == 3 + n
                continue
            assert k.shape[1] == 3 + len(rows) == 3 + int(n * (1 - share))
            assert torch.equal(k[:, :3], sink[layer])
            assert torch.equal(k[:, 3:], keys[layer][:, rows])
            assert torch.equal(v[:, 3:], values[layer][:, rows])
            assert (bias == 0).all()


def test_slow_drift_of_attention_leads_to_no_new_choice() -> None:
    memory, world = built(DyCokeDecodeConfig(prune_share=0.5), shape_of(layers=4, heads=1, sink=3))
    steps = feed(memory, world, [6, 6])
    # The attention of the third layer decides.
    keys, sink = torch.cat([step.keys for step in steps], 2)[2], memory.tensors()["sink.keys"][2]
    drift = [keys[:, 2:3] * (1 - k / 40) + keys[:, 9:10] * (k / 40) for k in range(41)]
    _, times = literal_pruning(drift, keys, sink, 0.5)
    _, jumps = literal_pruning([drift[0], drift[-1]], keys, sink, 0.5)
    assert (times, jumps) == (1, 2)
    context = memory.recall()
    # The first query is the question; the last layer reads what the decode steps chose.
    read = [[shown_to(context, layer, query)[0] for layer in range(4)][3] for query in (drift[0], *drift)]
    assert all(torch.equal(later, read[1]) for later in read[2:])


def test_a_compacted_context_prunes_the_same_tokens() -> None:
    shape = shape_of(layers=4, heads=2, sink=3)
    memory, world = built(DyCokeDecodeConfig(budget=8), shape)
    feed(memory, world, [6, 6])
    context = memory.recall()
    whole = compact_context(memory.context(), anchored(world, -4), 0)
    compact = context.compact(anchored(world, -4), context.far_span())
    assert (compact.shift, compact.next_position) == (whole.shift, whole.next_position) == (4, 8)
    query = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        read = [shown_to(compact, layer, query) for layer in range(4)]
    assert torch.equal(read[0][0], shown_to(whole, 0, query)[0])
    assert read[3][0].shape[1] == 3 + int(12 * (1 - 0.7))


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_the_first_token_is_the_full_cache_s_and_nothing_pruned_is_the_full_cache(tiny: Backbone, share: float) -> None:
    config = MemoryConfig.of("dycoke-decode", budget=40, prune_share=share, first_pruned_layer=1)
    session, full = watched(tiny, config, range(9)), watched(tiny, MemoryConfig.of("full", budget=40), range(9))
    assert torch.equal(session.prefill(QUESTION), full.prefill(QUESTION))
    decoding = Decoding(max_new_tokens=1 if share else 12)
    assert session.ask(QUESTION, decoding).text == full.ask(QUESTION, decoding).text


def test_a_decoded_token_is_read_from_what_is_left(tiny: Backbone) -> None:
    logits = []
    for share in (0.0, 0.9):
        config = MemoryConfig.of("dycoke-decode", budget=40, prune_share=share, first_pruned_layer=1)
        session = watched(tiny, config, range(9))
        before = {name: tensor.clone() for name, tensor in session.tensors().items()}
        reading = session.read_question(QUESTION, room=1)
        context, tail = reading.context, reading.local_kv
        with torch.inference_mode():
            where = tiny.text_positions(session.clock.next_position + tail.length, 1)
            logits.append(tiny.logits(tiny.forward(tiny.embed_text([9]), where, context, tail)))
        assert all(torch.equal(before[name], tensor) for name, tensor in session.tensors().items())
    assert (logits[0] - logits[1]).abs().max() > 1e-3
