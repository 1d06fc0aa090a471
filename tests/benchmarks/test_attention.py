"""Attention over biased slots beside the same kernel over as many tokens without any bias. See README.md."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from protokv.core.attention import attend, causal_mask
from protokv.core.context import Segment
from protokv.core.kernels import attention
from tests.benchmarks.conftest import Sizes
from tests.benchmarks.paired import paired, write_table
from tests.oracles import attention as plain

NOTE = (
    "One layer. `ms`: attention over N slots with a bias, merged with a causal tail. `other_ms`: one call of the same "
    "fused kernel over N and the tail's tokens, without bias and mask. `oracle_ms`: the plain form, once. For one "
    "token the median of five places in memory: the same call elsewhere differs by a twentieth."
)


@pytest.mark.timeout(3600)
def test_attention_with_a_bias_beside_attention_without(
    request: pytest.FixtureRequest, sizes: Sizes, device: torch.device
) -> None:
    measured = request.config.getoption("benchmark_enable")
    H, D, scaling = sizes.kv_heads, sizes.head_size, sizes.head_size**-0.5
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for budget in (6, 24):
            for T, before in ((sizes.tokens, 0), (1, 40)):
                N, n = budget * sizes.unit, before + T
                g = torch.Generator(device).manual_seed(0)
                noise = lambda *size, g=g, dtype=dtype: torch.randn(size, generator=g, device=device).to(dtype)  # noqa: E731
                query, keys, values = noise(H * sizes.groups, T, D), noise(H, N + n, D), noise(H, N + n, D)
                bias = torch.randint(1, 400, (H, N), generator=g, device=device).float().log()
                segment = Segment(keys[:, :N].contiguous(), values[:, :N].contiguous(), bias)
                tail = keys[:, N:].contiguous(), values[:, N:].contiguous()
                causal = causal_mask(T, n, sizes.groups, device)
                expected = plain.attend(query, [segment], tail, scaling)
                ours = attend(query, [segment], tail, scaling, causal)
                # No figure for what does not equal its oracle.
                tolerance = 1e-4 if dtype == torch.float32 else 2**-6
                torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
                if not measured:
                    continue
                folded = query.reshape(H, -1, D)
                places, several = [], []
                with torch.inference_mode():
                    for _ in range(1 if T > 1 else 5):
                        shown = replace(segment, keys=segment.keys.clone(), values=segment.values.clone())
                        elsewhere = keys.clone()
                        # Held, so that the next ones stand elsewhere again.
                        places.append((shown, elsewhere))
                        several.append(
                            paired(
                                device,
                                lambda: attend(query, [shown], tail, scaling, causal),  # noqa: B023 - called at once
                                lambda: attention(folded, elsewhere, values, None, scaling),  # noqa: B023
                                5 if T > 1 else 41,
                            )
                        )
                    times = sorted(several, key=lambda each: float(each["ratio"]))[len(several) // 2]
                    oracle = paired(device, lambda: plain.attend(query, [segment], tail, scaling), lambda: None, 1)  # noqa: B023
                rows.append({"dtype": str(dtype)[6:], "N": N, "T": T, "tail": n} | times | {"oracle_ms": oracle["ms"]})
    if rows:
        write_table("attention", device.type, rows, NOTE)
