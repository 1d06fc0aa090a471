"""Which source an address names, without its secrets, and which content a fingerprint stands
for.
"""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import ConfigError
from protokv.video.address import check_source_address, redact_source, source_kind, source_stem
from protokv.video.registry import fingerprint_video_file

SECRET = st.text("abcXYZ019_~!$*+,;=%-.", min_size=4).map(lambda s: f"s3c{s}")


@given(SECRET, SECRET, SECRET)
def test_no_user_no_password_and_no_value_of_an_unknown_parameter_is_shown(
    user: str, password: str, token: str
) -> None:
    for address in (
        f"rtsp://{user}:{password}@camera.example:554/stream1?channel=2&token={token}",
        f"rtsp://camera.example:554/user={user}&password={password}&channel=2",
        f"https://{user}@camera.example:554/live.m3u8?channel=2&sig={token}#{token}",
        f"srt://camera.example:554?channel=2&passphrase={token}",
    ):
        text = redact_source(address)
        assert "s3c" not in text
        assert "camera.example:554" in text
        assert "channel=2" in text or ";" in user + password + token
        assert "s3c" not in source_stem(address)


@pytest.mark.parametrize(
    ("address", "kind", "text", "name"),
    [
        ("-", "pipe", "stdin", "stdin"),
        ("rtsp://camera/1", "rtsp", "rtsp://camera/1", "camera-1"),
        ("RTSP://admin:pw@Camera/1", "rtsp", "rtsp://Camera/1", "Camera-1"),
        (
            "https://host/a/live.m3u8?x=1",
            "https",
            "https://host/a/live.m3u8?x=***",
            "host-a-live.m3u8",
        ),
        ("/dev/video0", "v4l2", "/dev/video0", "dev-video0"),
        ("screen:", "screen", "screen:", "screen"),
        ("rtsp://[broken/x?pw=1", "rtsp", "rtsp://***", "rtsp"),
        ("videos/a:b.mp4", "file", "a:b.mp4", "a:b"),
        ("C:\\videos\\a.mp4", "file", "C:\\videos\\a.mp4", "C:\\videos\\a"),
        ("gopher://host/x", "gopher", "gopher://host/x", "host-x"),
    ],
)
def test_an_address_has_a_kind_a_text_and_a_file_name(
    address: str, kind: str, text: str, name: str
) -> None:
    assert (source_kind(address), redact_source(address), source_stem(address)) == (
        kind,
        text,
        name,
    )
    assert re.fullmatch(r"[^/]+", source_stem(address))


BROKEN = ["/", "#", "?", "//", "/x?y#", "@/", "/@"]


@pytest.mark.parametrize("scheme", ["rtsp", "rtmp", "http", "srt"])
@pytest.mark.parametrize("middle", BROKEN)
def test_a_password_that_is_not_escaped_is_refused_and_never_shown(
    scheme: str, middle: str
) -> None:
    address = f"{scheme}://admin:s3c{middle}ret@camera:554/1"
    assert not re.search("s3c|ret|admin", redact_source(address) + source_stem(address))
    if "@/" not in middle:
        with pytest.raises(ConfigError) as caught:
            check_source_address(address)
        assert not re.search("s3c|ret|admin", caught.value.message)
        assert "%2F" in caught.value.hint


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("https://host/@user/a.mp4", "https://host/@user/a.mp4"),
        ("https://host:80/a.mp4?mail=s3c@ret", "https://host:80/a.mp4?mail=***"),
        ("https://u:s3c@host/a.mp4?sig=s3c@ret", "https://***"),
        ("rtsp://admin:1234/s3c@host/1", "rtsp://***"),
        (
            "rtsp://cam:9/user=admin&password=s3c&ret&channel=1",
            "rtsp://cam:9/user=***&password=***&channel=1",
        ),
    ],
)
def test_what_may_be_a_secret_around_an_at_sign_is_not_shown(address: str, text: str) -> None:
    assert redact_source(address) == text
    check_source_address(address)


SIZE = 1 << 20
SAME = b"a" * SIZE
FILM = bytes(range(256)) * (SIZE // 256)
CHANGED = SAME[: SIZE // 2] + b"b" * 2048 + SAME[SIZE // 2 + 2048 :]
# A download into preallocated space.
PARTLY = FILM[:4096] + bytes(SIZE - 8192) + FILM[-4096:]


@pytest.mark.parametrize("piece", [64 << 10, 16], ids=["whole", "in pieces"])
def test_other_content_is_another_file_and_a_beginning_is_a_file_that_ends_there(
    piece: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not its size and its ends alone count; large files are read in pieces."""
    monkeypatch.setattr("protokv.video.registry._PIECE", piece)
    found = []
    for data in (SAME, SAME + b"a", CHANGED, FILM, PARTLY):
        (tmp_path / "whole").write_bytes(data)
        found.append(fingerprint_video_file(tmp_path / "whole"))
    assert len(set(found)) == len(found)
