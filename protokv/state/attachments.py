"""The attachments of a state: what it has besides its memory, thumbnails and a transcript."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from protokv.core.parts import Attachment
from protokv.state.thumbnails import Thumbnails
from protokv.words.transcript import Transcript

SPECS = (*Thumbnails.declare(), *Transcript.declare())
"""The tensors that any state may have besides its memory."""


def restore_attachments(tensors: Mapping[str, Tensor]) -> list[Attachment]:
    """Return the attachments of a state: the transcript, empty if it has none, and its thumbnails if it has any.

    Raises:
        StateCorrupt: they are damaged.
    """
    thumbnails = Thumbnails.read(tensors)
    return [Transcript.of(tensors), *([] if thumbnails is None else [thumbnails])]
