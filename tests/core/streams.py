"""Small settings and positions for tests of memories, beside the streams of `protokv.testing`."""

from collections.abc import Sequence
from typing import Any

from protokv.core.context import PositionFacts
from protokv.core.memory import Memory
from protokv.core.rotary import PreciseRotary
from protokv.core.tensors import TensorDict
from protokv.memories import DurableConfig, PaperConfig
from protokv.stream.stream import Stream
from protokv.testing.streams import PlainRotary as PlainRotary
from protokv.testing.streams import ToyStream as World
from protokv.testing.streams import feed as feed
from protokv.testing.streams import have_equal_bits as same
from protokv.testing.streams import make_shape as shape_of
from protokv.testing.streams import read_layer as shown_to
from protokv.testing.streams import read_slots as slots_of

__all__ = ["PlainRotary", "World", "feed", "same", "shape_of", "shown_to", "slots_of"]


def small_config(budget: int = 29, **changes: Any) -> PaperConfig:
    """The paper's rules in a size where a short stream fills, evicts, ages, merges and recycles."""
    defaults: dict[str, Any] = {
        "pseudo_tokens": 2,
        "idle_steps": 4,
        "subquantizers": 2,
        "codewords": 4,
        "warmup_residuals": 11,
        "merge_key_distance": 0.5,
        "merge_value_distance": 0.5,
    }
    return PaperConfig(budget=budget, **(defaults | changes))


def small_durable(budget: int = 29, **changes: Any) -> DurableConfig:
    """The default memory in such a size, its centres in float32."""
    return DurableConfig(budget=budget, **{"center_bits": 32, **changes})


def anchored(world: World, origin: int, moving: Sequence[int] = (0,)) -> PositionFacts:
    """What re-anchoring must know of the model and of a stream of a test."""
    precise = PreciseRotary(world.rotary, world.shape.position_components)
    return PositionFacts(precise, origin, 2**18, moving)


def copy_of(memory: Memory | Stream) -> TensorDict:
    """The state, safe from later steps."""
    return {name: tensor.clone() for name, tensor in memory.tensors().items()}
