"""Steps of several streams that are taken together leave the states that they leave one by one, in
one forward.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone, PreparedStep
from protokv.core.step import StepTokens
from protokv.errors import ConfigError
from protokv.memories import MEMORIES, MemoryConfig
from protokv.stream.seeing import StepsToWatch, watch_together
from protokv.stream.session import Session
from protokv.stream.taking import MOST_STREAMS, DueSteps, take_together
from protokv.timings import Timings
from tests.backbones.tiny import BUILDERS
from tests.conftest import continued, random_frames
from tests.mock_backbone import MockBackbone
from tests.stream.test_still import note_sizes
from tests.stub_backbone import StubBackbone
from tests.tolerance import check_logits

HEADS = 6  # of queries; two of keys


class WithoutSums(StubBackbone):
    """Keys, values and queries are parts of what came in, so only attention adds anything up."""

    def __init__(self) -> None:
        super().__init__(layers=2, kv_heads=2, groups=3, head_size=8, dtype=torch.float32)

    def embed_text(self, ids: list[int]) -> Tensor:
        return self.make(len(ids), 1).embeddings

    def make(self, tokens: int, seed: int) -> StepTokens:
        generator = torch.Generator().manual_seed(100 * seed + tokens)
        size = (HEADS + 4) * self.head_size
        self.grid = (1, tokens)
        return StepTokens(torch.randn(tokens, size, generator=generator), (1, tokens))

    def step_positions(self, tokens: StepTokens, **named: Any) -> Any:
        self.grid = tokens.grid
        return super().step_positions(tokens, **named)

    def forward(self, embeddings: Tensor, positions: Tensor, cache: Any, **_: Any) -> Tensor:
        x = embeddings
        for layer in range(self.layers):
            query, keys, values = (
                x.unflatten(1, (-1, self.head_size)).transpose(0, 1).split([HEADS, 2, 2])
            )
            out = cache.attend(layer, query, (keys, values), 0.3).transpose(0, 1).flatten(1)
            x = x + torch.nn.functional.pad(out, (0, x.shape[1] - out.shape[1]))
        return x


BITS = WithoutSums()


def make_config(kind: str, budget: int, positions: str) -> MemoryConfig:
    return MemoryConfig.of(kind, budget=budget).with_fields({"positions": positions})


Due = tuple[int, int, list[int]]  # a stream, its seed, and the tokens of its steps


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[MemoryConfig], list[list[Due]]]:
    """Any memories, and which streams are due at each of some times, with steps of any size."""
    kinds = st.sampled_from(sorted(MEMORIES))
    some = draw(
        st.lists(
            st.builds(
                make_config, kinds, st.integers(24, 61), st.sampled_from(["stream", "compact"])
            ),
            min_size=1,
            max_size=MOST_STREAMS + 2,
        )
    )
    steps = st.lists(st.integers(1, 13), min_size=1, max_size=3)
    one = st.tuples(st.integers(0, len(some) - 1), st.integers(0, 99), steps)
    due = st.lists(one, min_size=1, unique_by=lambda due: due[0])
    return some, draw(st.lists(due, min_size=1, max_size=9))


def make_due(sessions: Sequence[Session], due: Sequence[Due]) -> list[DueSteps]:
    found = []
    for place, seed, sizes in due:
        session = sessions[place]
        clock = session.clock
        times = [clock.next_start_s + n * clock.step_seconds for n in range(len(sizes))]
        found.append(DueSteps(session, [BITS.make(n, seed) for n in sizes], times))
    return found


def compare(session: Session, other: Session) -> None:
    assert session.clock == other.clock
    torch.testing.assert_close(session.tensors(), other.tensors(), rtol=0, atol=0)


@given(given=rounds())
def test_states_are_equal_bit_for_bit_where_only_attention_adds_up(
    given: tuple[list[MemoryConfig], list[list[Due]]],
) -> None:
    configs, times = given
    alone = [Session.start(BITS, config) for config in configs]
    together = [Session.start(BITS, config) for config in configs]
    for number, due in enumerate(times):
        for one in make_due(alone, due):
            one.session.take(one.steps, one.starts_s)
        assert not take_together(make_due(together, due))
        if number == len(times) // 2:
            together[0] = continued(together[0])
    for pair in zip(alone, together, strict=True):
        compare(*pair)


# No near-tie of what a model makes parts what they keep.
KEEP_BY_PLACE = ["full", "sliding-window", "first-tokens", "random"]


@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_states_are_near_those_one_by_one_in_every_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load_backbone(str(BUILDERS[family](tmp_path)), device="cpu", dtype="float32")
    configs = [MemoryConfig.of(kind, budget=21 + 8 * n) for n, kind in enumerate(KEEP_BY_PLACE)]
    alone = [Session.start(backbone, config) for config in configs]
    together = [Session.start(backbone, config) for config in configs]
    sizes = note_sizes(backbone, "forward", monkeypatch)
    passes = note_sizes(backbone, "embed_steps", monkeypatch)
    for index in range(5):
        steps = [
            backbone.prepare(
                random_frames(index + 9 * n, backbone.frames_per_step, 56, 56 + 28 * (n % 2))
            )
            for n in range(len(configs))
        ]
        for session, step in zip(alone, steps, strict=True):
            session.watch_prepared([step], [float(index)])
        each = sizes[:]
        sizes.clear()
        passes.clear()
        watch(together, [([step], [float(index)]) for step in steps])
        assert sizes == ([sum(each)] if backbone.joins else each)
        assert passes == [*Counter(step.grid for step in steps).values()]
        sizes.clear()
    for one, other in zip(alone, together, strict=True):
        assert one.clock == other.clock
        for name, held in one.tensors().items():
            check_logits(one, other.tensors()[name], held)


def watch(
    sessions: Sequence[Session], shown: Sequence[tuple[list[PreparedStep], list[float]]]
) -> list[Exception | None]:
    """Let each session watch its steps at their times, together; return why some have not."""
    due = [StepsToWatch(one, *own) for one, own in zip(sessions, shown, strict=True)]
    watch_together(due)
    return [one.error for one in due]


class NeverThree(MockBackbone):
    """Its tower fails where three pictures are in a pass."""

    def embed_steps(self, steps: Sequence[PreparedStep], times_s: Any) -> list[StepTokens]:
        assert len(steps) != 3
        return super().embed_steps(steps, times_s)


MOCK = NeverThree()
PICTURES = [MOCK.prepare(random_frames(seed, 2, 8, 12)) for seed in range(4)]
SHOWN = st.lists(st.sampled_from(PICTURES), min_size=1, max_size=2)


@given(given=st.lists(st.dictionaries(st.integers(0, MOST_STREAMS + 1), SHOWN), max_size=9))
def test_pictures_seen_together_are_those_seen_one_by_one(
    given: list[dict[int, list[PreparedStep]]],
) -> None:
    config = MemoryConfig.of("durable", budget=24)
    alone = [Session.start(MOCK, config) for _ in range(MOST_STREAMS + 2)]
    together = [Session.start(MOCK, config) for _ in alone]
    for index, shown in enumerate(given):
        each = [(own, [3.0 * index + n for n in range(len(own))]) for own in shown.values()]
        for place, own in zip(shown, each, strict=True):
            alone[place].watch_prepared(*own)
        assert not any(watch([together[place] for place in shown], each))
    for pair in zip(alone, together, strict=True):
        compare(*pair)


def test_streams_under_other_system_prompts_share_a_forward(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [tiny, tiny.with_system("the star is blue")]
    sessions = [Session.start(one, MemoryConfig.of("durable", budget=24)) for one in models]
    sizes = note_sizes(tiny, "forward", monkeypatch)
    step = tiny.prepare(random_frames(0))
    assert not any(watch(sessions, [([step], [0.0])] * 2))
    assert len(sizes) == 1


def test_a_stream_that_cannot_take_its_step_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = MemoryConfig.of("durable", budget=24)
    *sessions, alone = (Session.start(BITS, config) for _ in range(5))
    first: list[Due] = [(place, 4, [9]) for place in range(5)]
    assert not take_together(make_due([*sessions, alone], first))
    sessions[0].outside = True
    no_room = Mock(side_effect=RuntimeError("no room"))
    monkeypatch.setattr(sessions[2].memory, "append", no_room)
    due: list[Due] = [(place, 5, [7, 4]) for place in range(4)]
    failed = take_together(make_due(sessions, due))
    assert [type(failed.get(one)) for one in sessions] == [
        ConfigError,
        type(None),
        RuntimeError,
        type(None),
    ]
    # What cannot be forwarded has changed nothing; half a step must not be saved.
    assert [one.intact for one in sessions] == [True, True, False, True]
    assert not take_together(make_due([alone], [(0, 5, [7, 4])]))
    compare(alone, sessions[1])
    compare(alone, sessions[3])


def test_all_of_a_shared_forward_have_their_part_of_its_time() -> None:
    sessions = [Session.start(BITS, MemoryConfig.of("durable", budget=24)) for _ in range(3)]
    for one in sessions:
        one.timings = Timings()
    take_together(make_due(sessions, [(place, 1, [5]) for place in range(3)]))
    seconds = [one.timings.seconds for one in sessions if one.timings is not None]
    assert len({one["forward"] for one in seconds}) == 1
    assert all(one.keys() == {"memory", "forward"} for one in seconds)
