"""What a memory shows to the model, and how it is re-anchored to consecutive positions."""

from protokv.context.base import EMPTY, Anchoring, Context, EmptyContext, Segment
from protokv.context.compact import CompactContext
from protokv.context.decoded import DecodedContext
from protokv.context.recorded import RecordedContext
from protokv.context.slots import SlotContext

__all__ = [
    "EMPTY",
    "Anchoring",
    "CompactContext",
    "Context",
    "DecodedContext",
    "EmptyContext",
    "RecordedContext",
    "Segment",
    "SlotContext",
]
