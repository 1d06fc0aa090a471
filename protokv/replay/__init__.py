"""The delayed-query protocol: watch a stream once, and ask every question at each delay under every memory.

From bottom to top: `questions` and `benchmarks`; `streams` and `worlds`; `memories`, `studies` and `schedule`; the pass
(`runner`) and its plan (`plan`, `request`); results (`rows`, `judges`) and reports (`report`, `tables`, `figure`).
"""
