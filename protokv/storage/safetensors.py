"""A state as one `.safetensors` file. `protokv.core.snapshot` has its layout; `FileForm` commits and verifies it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from protokv.core.snapshot import map_safetensors, write_safetensors
from protokv.storage.files import FileForm


class SafetensorsForm(FileForm):
    """One `.safetensors` file."""

    suffix = ".safetensors"

    def fill(self, file: BinaryIO, document: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the document and the tensors."""
        write_safetensors(file, document, tensors)

    def map(self, target: Path) -> tuple[object, object]:
        """Return the document and the memory-mapped tensors."""
        return map_safetensors(target)
