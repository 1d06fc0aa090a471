"""The delayed-query protocol: watch a stream once, and ask every question at each delay under every
memory.

From bottom to top: `questions` and `benchmarks`; `streams` and `dataset`; `memories`; the pass
(`runner`) and its plan (`plan`); results (`rows`, `judges`); reports (`report`, `tables`,
`figure`).
"""
