"""Vision-language models as backbones: the interface, one file a family, and loading by name or
folder.
"""

from protokv.backbones.registry import (
    MODEL_FAMILIES,
    identify_backbone,
    load_backbone,
    require_model,
)

__all__ = ["MODEL_FAMILIES", "identify_backbone", "load_backbone", "require_model"]
