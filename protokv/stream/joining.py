"""A forward for tokens of several streams or questions, each of which reads a context of its own.

Everything in a decoder but attention works on each token by itself. So on a device all between the
layers of attention is captured, by the sizes of a batch, whoever is in it. Attention, which reads
what each of them has to read, is called anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from torch import Tensor

from protokv.core.attention import ContextReaders, TokenCache
from protokv.core.backbone import Backbone
from protokv.core.context import Context
from protokv.device.arrays import KeysValues

Due = TypeVar("Due")
ForwardCall = Callable[[TokenCache, Sequence[Tensor]], Tensor]


def join_forward(
    backbone: Backbone,
    name: str,
    key: Hashable,
    cache: TokenCache,
    forward: ForwardCall,
    given: Sequence[Tensor],
) -> Tensor:
    """Return `forward(cache, given)`, `[T, E]`, of tokens that `cache` takes in; its `readers` say
    what each of them reads. `name` and `key` are those of `Runs.run`.
    """
    runs = backbone.runs
    if runs is None:
        return forward(cache, given)

    def attend(query: Tensor, asked: Any) -> Tensor:
        number, kv, scaling = asked
        # The place of a query is that of the next one, too.
        own = query if cache.queries is None else query.clone()
        return cache.attend(number, own, kv, scaling)

    def run(*given: Tensor) -> Tensor:
        hollow = cache.fork(Context())
        for layer in hollow.memory_layers:
            layer.clear()
        hollow.outside = runs.leave
        return forward(hollow, given)

    hidden: Tensor = runs.run(name, key, run, *given, outside=attend)
    return hidden


def split_batch(some: Sequence[Due], backbone: Backbone, most: int) -> list[Sequence[Due]]:
    """Return parts of at most so many; of 1, 2, 4 or 8 where a model is captured by the size of a
    batch.
    """
    found = list[Sequence[Due]]()
    while some:
        size = min(len(some), most)
        if backbone.runs is not None and not backbone.runs.why_not:
            size = 1 << (size.bit_length() - 1)
        found.append(some[:size])
        some = some[size:]
    return found


def forward_caches(
    backbone: Backbone,
    key: Hashable,
    caches: Sequence[TokenCache],
    sizes: Sequence[int],
    forward: ForwardCall,
    given: Sequence[Tensor],
) -> list[KeysValues]:
    """Return keys and values `[L, H, T, D]` of the tokens of each cache, of these sizes, that are
    forwarded one after the other; the caches go on behind them.
    """
    rows = [slice(*pair) for pair in pairwise([0, *accumulate(sizes)])]
    whole = caches[0].fork()
    whole.queries = None if all(one.queries is None for one in caches) else []
    whole.readers = [
        ContextReaders(one.context, own, local=own) for one, own in zip(caches, rows, strict=True)
    ]
    join_forward(backbone, "steps together", key, whole, forward, given)
    keys, values = whole.read_all()
    for one, own in zip(caches, rows, strict=True):
        one.take(one, own.stop - own.start)
        if one.queries is not None and whole.queries:
            one.queries = [query[:, own] for query in whole.queries]
    return [(keys[:, :, own], values[:, :, own]) for own in rows]
