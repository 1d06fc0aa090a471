"""Choosing tokens and streaming text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from protokv.core.decoding import (
    Decoding,
    Detokenizer,
    TokenSampler,
    is_looping,
    penalise_repetition,
)
from protokv.errors import ConfigError

CPU = torch.device("cpu")


def test_a_draw_is_that_of_multinomial() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    choose = TokenSampler(Decoding(temperature=1.5, seed=3), CPU)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        ordered, ids = (logits / 1.5).softmax(-1).sort(descending=True)
        assert (
            choose(logits).tolist()
            == ids[torch.multinomial(ordered, 1, generator=generator)].tolist()
        )


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 30))
def test_a_penalty_is_that_of_transformers(seed: int, size: int, length: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=g)
    ids = torch.randint(size, (length,), generator=g)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids[None], logits[None])[0]
    assert torch.equal(penalise_repetition(logits, ids, 1.3), expected)


@given(
    st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 14), st.sampled_from([0.3, 0.9, 1.0])
)
def test_a_draw_is_among_the_tokens_that_transformers_leaves(
    seed: int, size: int, top_k: int, top_p: float
) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    left = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits[None]))[0].isfinite()
    choose = TokenSampler(Decoding(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed), CPU)
    assert {choose.fetch(choose(logits)) for _ in range(20)} <= set(
        left.nonzero().flatten().tolist()
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**9),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_impossible_settings_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        Decoding(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "shown", "end"),
    [
        ("aé!".encode(), ["a", "", "é", "!"], ""),
        ("é".encode()[:1], [""], "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_character_in_two_tokens_waits_for_its_rest_or_the_end(
    raw: bytes, shown: list[str], end: str
) -> None:
    stream = Detokenizer(lambda ids: bytes(ids).decode(errors="replace"))
    assert [stream.push(byte) for byte in raw] == shown
    assert stream.finish() == end


@pytest.mark.parametrize("group", [[7], [7, 8], [1, 2, 3, 4, 5], list(range(32))])
def test_a_group_of_tokens_again_and_again_is_a_repetition_wherever_it_begins(
    group: list[int],
) -> None:
    ids = [99, 98, *group * 40]
    first = next(n for n in range(len(ids)) if is_looping(ids[:n]))
    assert first == 2 + max(32, 8 * len(group))
    assert all(is_looping(ids[:n]) for n in range(first, len(ids)))


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [7] * 31,  # ha ha ha
        [5, 1] * 15,  # the line below the head of a table with 15 columns
        [token for row in range(20) for token in (1, row, 2, 3, 4, 1)],  # rows of a table
        [*[7] * 40, 8],  # it went on
    ],
    ids=["nothing", "laughter", "the head of a table", "a table", "a list that ends"],
)
def test_laughter_and_tables_are_no_repetition(ids: list[int]) -> None:
    assert not is_looping(ids)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.4), (-1.0, 0.4)])
def test_tokens_of_the_answer_are_penalised_as_in_openais_interface(
    presence: float, frequency: float
) -> None:
    logits = torch.randn(9, generator=torch.Generator().manual_seed(3))
    counts = torch.zeros(9)
    choose = TokenSampler(
        Decoding(presence_penalty=presence, frequency_penalty=frequency), CPU, prompt=range(9)
    )
    for _ in range(12):
        expected = int((logits - presence * (counts > 0) - frequency * counts).argmax())
        assert choose.fetch(choose(logits)) == expected
        counts[expected] += 1
    chances = [chance for (chance,) in choose.read_chances()]
    assert choose.mean_logprob() == pytest.approx(sum(one.log_probability for one in chances) / 12)
    assert [one.log_probability for one in chances] == pytest.approx(
        logits.log_softmax(-1)[[c.id for c in chances]].tolist()
    )


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ((), "a star. A ring."),
        ((". A",), "a star"),
        (("x", "ring", "star."), "a "),
        (("ring!",), "a star. A ring."),
    ],
)
def test_a_stop_and_its_beginning_are_never_shown(stop: tuple[str, ...], shown: str) -> None:
    stream = Detokenizer(lambda ids: bytes(ids).decode(), stop)
    pieces = list[str]()
    for byte in b"a star. A ring.":
        pieces.append(stream.push(byte))
        assert shown.startswith("".join(pieces))
        if stream.stopped:
            break
    assert "".join(pieces) + stream.finish() == shown
    assert stream.stopped == (shown != "a star. A ring.")
