"""HERMES equals its literal oracle, and a session forwards its probes."""

from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.core.context import SlotContext
from protokv.core.tensors import MemoryShape
from protokv.memories import HermesConfig
from protokv.memories.hermes import PROBE_TEXTS, Hermes
from tests.conftest import watched
from tests.core.streams import World, shape_of
from tests.oracles.hermes import NaiveHermes
from tests.tolerance import near, tolerance

# A score is a share of attention, scaled to [0, 1]: products over a head, and a softmax over the
# held tokens.
TIE = tolerance(torch.float32, 6 + 32, 2.0)


@given(
    config=st.builds(
        lambda bands, **rest: HermesConfig(shallow_share=bands[0], deep_share=bands[1], **rest),
        budget=st.integers(1, 30),
        kept_share=st.sampled_from([0.75, 0.75, 0.0, 0.3, 1.0]),
        bands=st.sampled_from([(0.1, 0.3), (0.4, 0.4), (0.0, 1.0), (1.0, 0.0)]),
    ),
    shape=st.builds(
        shape_of,
        layers=st.integers(1, 5),
        heads=st.integers(1, 2),
        size=st.just(6),
        components=st.sampled_from([1, 3]),
    ),
    group=st.integers(1, 2),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    probed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_it_equals_its_oracle_token_for_token(
    config: HermesConfig,
    shape: MemoryShape,
    group: int,
    lengths: list[int],
    probed: bool,
    seed: int,
) -> None:
    world = World(shape, seed)
    sink = world.sink()
    fast = Hermes(config, shape, world.rotary)
    fast.start(*sink)
    naive = NaiveHermes(config, shape, world.rotary, sink[0])
    generator = torch.Generator().manual_seed(seed)
    for index, tokens in enumerate(lengths):
        step = world.step(index, tokens)
        queries = None
        if probed and fast.probes_for(tokens):
            size = (shape.layers, shape.kv_heads * group)
            queries = [torch.randn(*size, n, 6, generator=generator) for n in (3, 5, 2)]
            fast.compact(queries, tokens)
        fast.append(step)
        naive.append(step, queries)
        if naive.margin < TIE:
            event("a near-tie ended the comparison")
            return
        compare(fast, naive)


def compare(fast: Hermes, naive: NaiveHermes) -> None:
    state = fast.tensors()
    n = len(naive.held[0])
    for layer, held in enumerate(naive.held):
        assert len(held) == n
        for head in range(fast._shape.kv_heads):
            assert state["kept.step"][layer, head, :n].tolist() == [token.step for token in held]
            assert torch.equal(
                state["kept.positions"][layer, head, :n], torch.stack([t.position for t in held])
            )
            for name, exact in (
                ("keys", [token.keys[head] for token in held]),
                ("values", [token.values[head] for token in held]),
                ("coordinates", [token.place for token in held]),
            ):
                # A mean of up to a hundred tokens whose keys are rotated to one position.
                allowed = near(torch.stack(exact), 100 + 12)
                torch.testing.assert_close(
                    state[f"kept.{name}"][layer, head, :n], torch.stack(exact), **allowed
                )
    assert (state["kept.step"][:, :, n:] == -1).all()
    context = fast.context()
    assert isinstance(context, SlotContext)
    assert int((context.bias > -torch.inf).sum(-1).max()) == n + fast._shape.sink_tokens


@pytest.mark.parametrize("positions", ["stream", "compact"])
def test_a_session_forwards_the_probes_and_the_memory_scores_by_their_queries(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    config = HermesConfig(budget=20, positions=positions)  # type: ignore[arg-type]
    given_queries: list[list[Tensor]] = []
    compact = Hermes.compact

    def spy(self: Hermes, queries: list[Tensor], tokens: int) -> None:
        given_queries.append([query.clone() for query in queries])
        compact(self, queries, tokens)

    monkeypatch.setattr(Hermes, "compact", spy)
    watched(tiny, config, range(8))
    assert given_queries
    for queries in given_queries:
        assert len(queries) == len(PROBE_TEXTS)
        for text, query in zip(PROBE_TEXTS, queries, strict=True):
            model: Any = tiny
            heads = model._text.config.num_attention_heads
            assert query.shape == (tiny.layers, heads, len(tiny.suffix_ids(text)), tiny.head_size)
            assert torch.isfinite(query).all()
