"""Sound in pieces: all that is heard, cut where it is quiet, the same wherever a reading begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import SourceUnreadable
from protokv.video import Source, open_source
from protokv.video.derived import Part
from protokv.video.source import Samples, Sound
from protokv.words.sound import QUIET_S, SILENT, Cutter
from tests.video.sounding import write_sounding
from tests.video.subtitled import write_subtitled

RATE, LONGEST_S = 100, 3.0
BURSTS = [(1.0, 1.6), (3.0, 3.5), (8.0, 9.0)]


def literal(samples: Samples) -> list[tuple[float, Samples]]:
    """The pieces by the definition, one window after the other."""
    found, begin, size = [], 0, round(QUIET_S * RATE)

    def loudness(start: int) -> float:
        return float(np.sqrt(np.mean([float(one) ** 2 for one in samples[start : start + size]])))

    while begin < len(samples):
        end = len(samples)
        if end - begin >= LONGEST_S * RATE:
            starts = range(begin + RATE, begin + 3 * RATE, size)
            best = min(starts, key=lambda start: (loudness(start), -start))
            end = best + size // 2
        whole = range(begin, end - size + 1, size)
        if any(loudness(start) > SILENT for start in whole):
            found.append((begin / RATE, samples[begin:end]))
        begin = end
    return found


@given(
    st.lists(st.tuples(st.integers(1, 150), st.sampled_from([0, 20, 900, 5000])), max_size=9),
    st.lists(st.integers(0, 1200), max_size=6),
    st.floats(0.0, 12.0),
)
def test_pieces_are_cut_as_the_definition_says_however_the_sound_comes_and_from_whenever_it_is_wanted(
    parts: list[tuple[int, int]], cuts: list[int], from_s: float
) -> None:
    signs = np.resize(np.array([1, -1, 1, 1], np.int16), sum(n for n, _ in parts))
    samples = signs * np.concatenate([np.empty(0, np.int16), *(np.full(n, loud, np.int16) for n, loud in parts)])
    cutter = Cutter(RATE, LONGEST_S, from_s)
    given_pieces = [one for part in np.split(samples, sorted(cuts)) for one in cutter.add(part)]
    found = [*given_pieces, *cutter.end()]
    wanted = [one for one in literal(samples) if one[0] + len(one[1]) / RATE > from_s]
    assert [one.start_s for one in found] == pytest.approx([start_s for start_s, _ in wanted])
    assert all((ours.samples == theirs).all() for ours, (_, theirs) in zip(found, wanted, strict=True))


def heard(source: Source, rate: int = 16_000, longest_s: float = 4.0, from_s: float = 0.0) -> list[Sound]:
    return list(source.sound(rate, longest_s, from_s))


@pytest.mark.parametrize(("name", "codec"), [("a.mkv", "pcm_s16le"), ("a.mp4", "aac"), ("a.mkv", "libopus")])
def test_a_tone_is_heard_when_it_sounds(name: str, codec: str, tmp_path: Path) -> None:
    with open_source(write_sounding(tmp_path / name, BURSTS, 10, codec)) as source:
        pieces = heard(source)
    sound = np.zeros(11 * 16_000, np.int16)
    for one in pieces:
        assert one.end_s - one.start_s <= 4.0
        start = round(one.start_s * 16_000)
        sound[start : start + len(one.samples)] = one.samples
    # The middle of each tenth of a second.
    loud = np.abs(sound[: 10 * 16_000].reshape(100, 1600)[:, 500:1100]).max(1) > 1000
    assert loud.nonzero()[0].tolist() == [n for a, b in BURSTS for n in range(round(10 * a), round(10 * b))]


def test_a_process_of_its_own_a_part_and_a_later_beginning_give_the_same_sound(tmp_path: Path) -> None:
    path = write_sounding(tmp_path / "a.mkv", BURSTS, 10, late_s=2.0)
    with open_source(path) as here, open_source(path, isolate=True) as there:
        whole, later, other = heard(here), heard(here, from_s=5.0), heard(there)
        next(there.frames())
        again = heard(there, from_s=5.0)
        part = heard(Part(here, 3.2))
    assert min(one.start_s for one in whole) >= 2.0
    for ours, theirs in ((whole, other), (later, again), (later, [one for one in whole if one.end_s > 5.0])):
        assert [(one.start_s, one.samples.tolist()) for one in ours] == [
            (one.start_s, one.samples.tolist()) for one in theirs
        ]
    assert part[0].start_s == pytest.approx(0.0, abs=1e-3)
    assert part[-1].samples.tolist() == whole[-1].samples.tolist()
    assert part[-1].start_s == pytest.approx(whole[-1].start_s - 3.2)


def test_what_cannot_be_heard_is_one_sentence_after_all_that_can(tmp_path: Path) -> None:
    with (
        open_source(write_subtitled(tmp_path / "b.mkv", {}), isolate=True) as silent,
        pytest.raises(SourceUnreadable, match="has no sound"),
    ):
        heard(silent)
    path = write_sounding(tmp_path / "a.mkv", BURSTS, 10, "aac")
    with open_source(path, isolate=True) as source:
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(
            whole[:middle] + bytes(b ^ 0x5A for b in whole[middle : middle + 2000]) + whole[middle + 2000 :]
        )
        found: list[Sound] = []
        with pytest.raises(SourceUnreadable, match="the sound"):
            found.extend(source.sound(16_000, 4.0))
