"""The embedded models `protokv/mini`, `-order` and `-words`: weights, network and backbone.

The weights are Qwen2.5-VL checkpoints that `from_pretrained` loads; `network` runs them without
transformers. They read the drawn shapes of `samples.worlds`, which is not part of the installed
package. The card, `README.md` beside this file, names the commit whose code trained them.
"""

from __future__ import annotations

WORLD_COMMENT = "drawn by the procedural world of protokv/mini"
"""What the container of a video says that these models can read."""
