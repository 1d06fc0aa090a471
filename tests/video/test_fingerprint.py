"""A file is told by its content: not by its size and its ends alone."""

from __future__ import annotations

import pytest

from protokv.video import fingerprint as module
from protokv.video.fingerprint import fingerprint


@pytest.fixture(params=["whole", "in pieces"])
def way(request, monkeypatch):
    """Small files, read as small ones are or as large ones are."""
    if request.param == "in pieces":
        monkeypatch.setattr(module, "PIECE", 16)
    return request.param


@pytest.fixture
def print_of(tmp_path):
    def of(data: bytes) -> str:
        (tmp_path / "x").write_bytes(data)
        return fingerprint(tmp_path / "x")

    return of


SIZE = 1 << 20


@pytest.mark.parametrize("begin", [0, 100_000, SIZE // 2, SIZE - 2048])
def test_the_same_size_and_other_bytes_anywhere_are_another_file(begin, way, print_of):
    data = bytearray(b"a" * SIZE)
    other = bytearray(data)
    other[begin : begin + 2048] = b"b" * 2048
    assert print_of(data) != print_of(other)


def test_a_preallocated_download_is_another_file_once_it_is_finished(way, print_of):
    film = bytes(range(256)) * (SIZE // 256)
    ends = film[:4096] + bytes(SIZE - 8192) + film[-4096:]
    half = film[: SIZE // 2] + bytes(SIZE // 2)
    assert len({print_of(film), print_of(ends), print_of(half)}) == 3


def test_a_single_byte_is_seen_in_a_small_file(print_of):
    assert print_of(b"a" * SIZE) != print_of(b"a" * (SIZE // 2) + b"b" + b"a" * (SIZE // 2 - 1))


def test_a_longer_file_with_the_same_beginning_is_another(way, print_of):
    assert print_of(b"a" * SIZE) != print_of(b"a" * (SIZE + 1))


def test_the_same_bytes_are_the_same_file(way, print_of):
    assert print_of(b"a" * SIZE) == print_of(b"a" * SIZE)
