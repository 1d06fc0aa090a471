"""A video in a bucket is copied into a temporary file, because decoders seek.

FFmpeg's own readers of object stores do not know our credentials and endpoints. So the disk must hold one video per
open source. The fingerprint comes from metadata of the store: it is known without a copy, and differs from that of the
same video in a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath

from protokv.errors import SourceError, SourceUnreadable
from protokv.video.bucket import fetch
from protokv.video.source import Damage, Frame, FrameRequest, Source


class ObjectSource(Source):
    """The video at an address. See `Source` for the contract.

    Args:
        address: `s3://BUCKET/KEY`, `gs://...` or `az://...`.
        open_copy: opens the file into which the object is copied.

    Raises:
        SourceError: as for a file, or the store cannot be read.
    """

    def __init__(self, address: str, open_copy: Callable[[Path], Source]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="protokv-", ignore_cleanup_errors=True)
        path = Path(self._folder.name, PurePosixPath(address).name or "video")
        with ExitStack() as on_error:
            on_error.callback(self._folder.cleanup)
            try:
                fingerprint = fetch(address, path)
                self._file = open_copy(path)
            except SourceError as error:
                raise type(error)(error.message.replace(str(path), address), hint=error.hint) from error
            except OSError as error:
                raise SourceUnreadable(
                    f"cannot copy {address} to {path.parent}: {error.strerror or error}",
                    hint="make room there, or name another folder with TMPDIR",
                ) from error
            on_error.pop_all()
        self.info = replace(self._file.info, kind=address.partition("://")[0], fingerprint=fingerprint)
        self.texts, self.lines = self._file.texts, self._file.lines  # type: ignore[method-assign]

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Source`."""
        return self._file.notes

    @property
    def damage(self) -> Damage:
        """See `Source`."""
        return self._file.damage

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        start_s, fps, from_beginning, should_stop = wanted
        return self._file.frames(start_s, fps=fps, from_beginning=from_beginning, should_stop=should_stop)

    def close(self) -> None:
        """End any reading, and remove the copy."""
        super().close()
        self._file.close()
        self._folder.cleanup()
