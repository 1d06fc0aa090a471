"""The page of the format names all that is in a state."""

from dataclasses import fields
from pathlib import Path

from protokv.core.backbone import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.state.header import DTYPE_NAMES, FORMAT_VERSION, StateHeader
from protokv.state.sources import StreamGap, WallClockLog
from protokv.video import SourceDamage, SourceInfo

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "format.md"


def test_the_page_of_the_format_names_every_field_and_every_type() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for record in (
        StateHeader,
        BackboneIdentity,
        StreamClock,
        SourceInfo,
        SourceDamage,
        WallClockLog,
        StreamGap,
    ):
        assert not [one.name for one in fields(record) if f"`{one.name}`" not in text], record
    assert f"version {FORMAT_VERSION}, the only one" in text
    assert all(f"`{name}`" in text for name in DTYPE_NAMES.values())
