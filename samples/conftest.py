"""Settings of the tests of the samples; `pytest samples` runs them."""

from hypothesis import settings

settings.register_profile("samples", max_examples=10, deadline=None, derandomize=True)
settings.load_profile("samples")
