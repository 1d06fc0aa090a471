"""What is the same for every video of a fleet: the model, the memory, how to sample, where states go.

A recipe travels to workers, so it is plain values; nothing is loaded before a worker asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protokv.config import DurableConfig, MemoryConfig
from protokv.ingestion.schedule import MINUTELY, Every
from protokv.video.registry import Decoder

if TYPE_CHECKING:
    from protokv.backbones.base import Backbone
    from protokv.core.records import BackboneIdentity


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model by name, as `load_backbone` takes it; the embedded one where `name` is None."""

    name: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    quantization: str | None = None
    revision: str | None = None

    def load(self, device: str) -> Backbone:
        """Load it. Raises as `load_backbone`."""
        from protokv.backbones import EMBEDDED, load_backbone

        return load_backbone(self.name or EMBEDDED, device=device, **self._options())

    def identify(self, device: str) -> BackboneIdentity:
        """Which model `load` would give, from its small files alone. Raises as `load_backbone`."""
        from protokv.backbones import EMBEDDED, identify_backbone

        return identify_backbone(self.name or EMBEDDED, device=device, **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype or "auto",
            "device_map": self.device_map,
            "quantization": self.quantization,
            "revision": self.revision,
        }


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How each video of a fleet becomes a state; see `ingest` for what is not said here.

    Attributes:
        place: folder, or prefix in an object store, that the states go to.
        model: loaded once a worker.
        force: start over a state of other settings or of another video; without it that is a failure of the video.
    """

    place: str
    model: Model = field(default_factory=Model)
    config: MemoryConfig = field(default_factory=DurableConfig)
    fps: float | None = None
    every: Every = MINUTELY
    keep: int | None = None
    decoder: Decoder = "auto"
    max_frame_pixels: int | None = None
    force: bool = False
