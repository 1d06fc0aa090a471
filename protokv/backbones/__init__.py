"""Vision-language models as backbones: the interface, one file a family, and loading by name or folder."""

from protokv.backbones.registry import FAMILIES, identify_backbone, load_backbone, require_model
from protokv.mini import EMBEDDED

__all__ = ["EMBEDDED", "FAMILIES", "identify_backbone", "load_backbone", "require_model"]
