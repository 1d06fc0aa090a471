"""Make plain tensors of what a question to a stream reads, for engines of others: `protokv.slots`
has their file.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from protokv.core.context import Context
from protokv.core.layers import LayerKind
from protokv.core.rotary import rotate, unrotate
from protokv.core.tensors import TensorDict
from protokv.errors import ConfigError, StateError
from protokv.slots import SlotsHead, write_slots
from protokv.state.header import State, digest_document, digest_tensors
from protokv.state.reader import StateReader
from protokv.state.store import StatePath
from protokv.stream.asking import AskedStream
from protokv.stream.opening import open_session


def digest_commit(state: State) -> str:
    """Return what tells the commit of a state from all others: the digest of its document."""
    document = {"header": state.to_json(), "digests": digest_tensors(state.tensors)}
    return digest_document(document)


def check_slots(stream: AskedStream) -> None:
    """Refuse a stream of which a question reads other things than a fixed set of slots.
    ConfigError.
    """
    others = set(stream.backbone.layer_kinds) - {LayerKind.FULL}
    for wrong, why in (
        (
            stream.memory.retrieves,
            f"{stream.config.name} chooses by the question what is read of it",
        ),
        (bool(stream.recent.steps), "recent_frames are read again by the model for each question"),
        (bool(others), "the model has layers without full attention, which have no slots"),
    ):
        if wrong:
            raise ConfigError(
                f"no other engine can serve this state: {why}", hint="ask it with protokv query"
            )


def find_lead(stream: AskedStream) -> list[int]:
    """Return the ids in front of each question that are of embeddings, and in no vocabulary: their
    tokens are slots, too.
    """
    return [token for token in stream.backbone.question_ids("?")[0] if token < 0]


def count_slots(stream: AskedStream) -> int:
    """Return how many slots `make_slots` gives. ConfigError: as there."""
    check_slots(stream)
    ids, context, _ = stream.aim(find_lead(stream))
    return context.visible_tokens() + len(ids)


@torch.inference_mode()
def make_slots(stream: AskedStream) -> TensorDict:
    """Return `keys`, `values`, `bias` and `positions` as `protokv.slots` has them, on the CPU.

    A head that has fewer slots than another has free ones at the end, with a bias of -inf.
    ConfigError: the memory shows no fixed set of slots. A model without weights has no lead.
    """
    check_slots(stream)
    backbone = stream.backbone
    ids, context, start = stream.aim(find_lead(stream))
    N = context.visible_tokens()
    parts = [_read_layer(context, layer, N, backbone.head_size) for layer in range(backbone.layers)]
    found = {name: torch.stack([one[name] for one in parts]) for name in parts[0]}
    if ids:
        keys, values = stream.read_question(ids).cache.read_all()
        where = backbone.text_positions(start, len(ids))
        lead = {
            "keys": keys,
            "values": values,
            "bias": torch.zeros(keys.shape[:3]),
            "positions": where.expand(*keys.shape[:3], -1),
        }
        found = {name: torch.cat((one, lead[name].cpu()), 2) for name, one in found.items()}
        N += len(ids)
        start += len(ids)
    # Attention knows differences of positions alone, so one angle moves all.
    move = torch.full((1, backbone.position_components), N - start)
    cos, sin = backbone.precise_rotary(move)
    rotated = backbone.rotated or [True] * backbone.layers
    for keys, turns in zip(found["keys"], rotated, strict=True):
        if turns:
            keys.copy_(rotate(keys.float(), (cos, sin)))
    # Slots before heads, as engines hold them.
    return {name: one.transpose(1, 2).contiguous() for name, one in found.items()}


def _read_layer(context: Context, layer: int, N: int, D: int) -> TensorDict:
    """Return the slots in use of a layer, `[H, N, ...]`."""
    segments = context.at(layer, torch.empty(0))
    places = context.positions_at(layer)
    keys = []
    for one in segments:
        keys.append(one.keys[..., :D])
        if one.query_rotation is not None:
            cos, sin = one.query_rotation
            keys[-1] = unrotate(keys[-1].float(), (cos, sin)).to(one.keys.dtype)
    bias = torch.cat([one.bias for one in segments], 1).cpu()
    free = bias <= -1e29
    order = free.int().sort(dim=1, stable=True).indices[:, :N]

    def choose(rows: Tensor) -> Tensor:
        rows = rows.cpu()
        return rows.gather(1, order[..., None].expand(-1, -1, rows.shape[-1]))

    assert places is not None
    return {
        "keys": choose(torch.cat(keys, 1)),
        "values": choose(torch.cat([one.values[..., :D] for one in segments], 1)),
        "bias": bias.masked_fill(free, -torch.inf).gather(1, order).float(),
        "positions": choose(places),
    }


def write_stream(stream: AskedStream, commit: str, target: StatePath) -> dict[str, str | int]:
    """Write what a question to a stream reads, under what tells its commit from others; return how
    many slots and bytes. ConfigError, StateError.
    """
    tensors = make_slots(stream)
    model = stream.backbone.identity
    bias = tensors["bias"]
    head = SlotsHead(
        slots=tensors["keys"].shape[1],
        commit=commit,
        model=model.name,
        family=model.family,
        dtype=model.dtype,
        weights_digest=model.weights_digest,
        biased=bool((bias != 0).any()),
        free=bool(bias.isinf().any()),
        ids=list(stream.backbone.prefix_ids),
    )
    try:
        written = write_slots(target, head, tensors)
    except OSError as error:
        raise StateError(f"{os.fspath(target)} cannot be written: {error.strerror}") from error
    return {"slots": head.slots, "bytes": written}


def export_slots(path: StatePath, target: StatePath, **how: Any) -> dict[str, str | int]:
    """Write the slots of a state for other engines; return paths, slots and bytes.

    `how` are arguments of `open_session`. ConfigError: no engine can serve it. StateError,
    ModelError.
    """
    reader = StateReader.open(path)
    session = open_session(reader, device="meta", **how)
    if find_lead(session):
        session = open_session(reader, **how)
    written = write_stream(session, digest_commit(reader.state), target)
    return {"state": str(path), "output": str(target)} | written
