"""Models that come with an installed package, registered by their name in the entry point group `protokv.backbones`.

An entry point names a `Backbone` that is also `Packaged`. The embedded models register so, and any other package may.
Imports nothing heavy before a model is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protokv.errors import ModelError

if TYPE_CHECKING:
    from protokv.backbones.loading import PlacementRequest

GROUP: Final = "protokv.backbones"


class Packaged(ABC):
    """What a backbone adds whose files lie in an installed package."""

    @classmethod
    @abstractmethod
    def folder(cls, name: str) -> Path:
        """Return the folder with the files of the model of this name."""

    @classmethod
    def adjust(cls, request: PlacementRequest) -> PlacementRequest:
        """Return a requested placement with what this model prefers; as it is by default."""
        return request


@cache
def packaged_models() -> dict[str, EntryPoint]:
    """Return name -> entry point of every packaged model."""
    return {point.name: point for point in entry_points(group=GROUP)}


def find_packaged(name: str) -> type[Packaged] | None:
    """Return the class of a packaged model; None if no package has one of this name.

    Raises:
        ModelError: its package is broken.
    """
    point = packaged_models().get(name)
    if point is None:
        return None
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise ModelError(f"the package of the model {name} is broken: {error}", hint="install it again") from error
    if not (isinstance(found, type) and issubclass(found, Packaged)):
        raise ModelError(f"{point.value}, registered as {name}, is no packaged model")
    return found
