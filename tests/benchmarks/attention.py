"""Compare attention over biased slots with the same kernel over as many tokens without a bias.

`python -m tests.benchmarks.attention` writes `results/attention-cpu.*` (or `-cuda`). A test runs it at a small size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from protokv.core.attention import attend, causal_mask
from protokv.core.context import Segment
from protokv.core.kernels import attention
from tests.benchmarks.results import paired, write_table
from tests.oracles import attention as plain

NOTE = (
    "One layer. `ms`: attention over N slots with a bias, merged with a causal local part. `other_ms`: one call of the "
    "same fused kernel over N and the local tokens, without bias and mask. For one token, the median of five places in "
    "memory: the same call elsewhere differs by a twentieth."
)


def compare(device: torch.device, *, unit: int, tokens: int, head_size: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each dtype, number of slots and number of queries, of 4 KV heads with 7 query heads each.

    Args:
        device: where to measure.
        unit: slots of one "k" of a budget.
        tokens: T of a step.
        head_size: D.
        rounds: how often each pair is measured.

    Raises:
        AssertionError: attention does not equal its oracle.
    """
    H, groups, D, scaling = 4, 7, head_size, head_size**-0.5
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for budget in (6, 24):
            for T, before in ((tokens, 0), (1, 40)):
                N, n = budget * unit, before + T
                g = torch.Generator(device).manual_seed(0)
                noise = lambda *size, g=g, dtype=dtype: torch.randn(size, generator=g, device=device).to(dtype)  # noqa: E731
                query, keys, values = noise(H * groups, T, D), noise(H, N + n, D), noise(H, N + n, D)
                bias = torch.randint(1, 400, (H, N), generator=g, device=device).float().log()
                segment = Segment(keys[:, :N].contiguous(), values[:, :N].contiguous(), bias)
                local = keys[:, N:].contiguous(), values[:, N:].contiguous()
                causal = causal_mask(T, n, groups, device)
                tolerance = 1e-4 if dtype == torch.float32 else 2**-6
                torch.testing.assert_close(
                    attend(query, [segment], local, scaling, causal),
                    plain.attend(query, [segment], local, scaling),
                    rtol=tolerance,
                    atol=tolerance,
                )
                folded = query.reshape(H, -1, D)
                # Keep the copies, so that the next ones lie at other addresses.
                places = [(replace(segment, keys=segment.keys.clone()), keys.clone()) for _ in range(1 if T > 1 else 5)]
                with torch.inference_mode():
                    several = [
                        paired(
                            partial(attend, query, [shown], local, scaling, causal),
                            partial(attention, folded, elsewhere, values, None, scaling),
                            rounds if T > 1 else 8 * rounds + 1,
                            device=device.type,
                        )
                        for shown, elsewhere in places
                    ]
                times = sorted(several, key=lambda each: float(each["ratio"] or 0))[len(several) // 2]
                rows.append({"dtype": str(dtype)[6:], "N": N, "T": T, "local": n} | times)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_table("attention", where.type, compare(where, unit=1000, tokens=196, head_size=128, rounds=5), NOTE)
