"""A state as one `.pt` file: `{"protokv": document, "tensors": {name: tensor}}`, for `torch.load(weights_only=True)`.

The file has a pickle in it, and a pickle can run code: `weights_only` runs none. `mmap` maps the tensors, so no tensor
is larger than the file.
"""

from __future__ import annotations

from pathlib import Path

import torch

from protokv.errors import StateCorrupt
from protokv.state.commit import write_file
from protokv.state.form import Form, Stored
from protokv.state.header import KEY, State


class PtForm(Form):
    """One `.pt` file."""

    suffix = ".pt"

    def write(self, path: Path, document: str, state: State) -> None:
        """Write the file with torch.save, which writes whole storages: each tensor gets its own."""
        content = {KEY: document, "tensors": {name: one.clone() for name, one in sorted(state.tensors.items())}}
        try:
            write_file(path, lambda file: torch.save(content, file))
        except RuntimeError as error:
            # torch hides the error of the file in its own.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def map(self, path: Path) -> Stored:
        """Map the tensors."""
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict) or not isinstance(content.get("tensors"), dict):
            raise StateCorrupt(f"a file of torch.save but no state: it lacks the field {KEY}")
        return Stored(content.get(KEY), content["tensors"], path.stat().st_size)
