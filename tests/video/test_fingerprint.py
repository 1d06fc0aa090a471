"""A fingerprint depends on the content of a file, and not on its size and its ends alone."""

from __future__ import annotations

import pytest

from protokv.video.file import fingerprint


@pytest.fixture(params=["whole", "in pieces"])
def way(request, monkeypatch):
    """Read small files whole, or in pieces like large ones."""
    if request.param == "in pieces":
        monkeypatch.setattr("protokv.video.file.PIECE", 16)
    return request.param


@pytest.fixture
def print_of(tmp_path):
    def of(data: bytes) -> str:
        (tmp_path / "x").write_bytes(data)
        return fingerprint(tmp_path / "x")

    return of


SIZE = 1 << 20
SAME = b"a" * SIZE
FILM = bytes(range(256)) * (SIZE // 256)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((SAME, SAME[:begin] + b"b" * 2048 + SAME[begin + 2048 :]) for begin in (0, 100_000, SIZE // 2, SIZE - 2048)),
        (SAME, SAME + b"a"),
        # A download into preallocated space.
        (FILM, FILM[:4096] + bytes(SIZE - 8192) + FILM[-4096:]),
        (FILM, FILM[: SIZE // 2] + bytes(SIZE // 2)),
    ],
    ids=["beginning", "first tenth", "middle", "end", "longer", "ends only", "first half only"],
)
def test_other_content_is_another_file(one, other, way, print_of):
    assert print_of(one) == print_of(one)
    assert print_of(one) != print_of(other)


def test_a_single_byte_is_seen_in_a_small_file(print_of):
    assert print_of(SAME) != print_of(SAME[: SIZE // 2] + b"b" + SAME[SIZE // 2 + 1 :])


@pytest.mark.parametrize("size", [1, 100, 1 << 17])
def test_the_fingerprint_of_a_beginning_is_that_of_a_file_that_ends_there(size, tmp_path, print_of):
    (tmp_path / "whole").write_bytes(FILM)
    assert fingerprint(tmp_path / "whole", size) == print_of(FILM[:size])
