"""One engine: a stream is a memory, the layers of a model and a clock.

`session` watches frames with it, `asking` answers, `cache` gives it the shape that transformers
calls, and `opening` reads it back from a state.
"""
