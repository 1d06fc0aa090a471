"""Tests that any memory must pass, for the house and for authors of memories elsewhere.

```python
from protokv.testing import MemoryTests

class TestMyRule(MemoryTests):
    configs = [MyConfig(budget=29)]
```

It needs pytest, which `pip install "protokv[test]"` brings.
"""

import pytest

pytest.register_assert_rewrite("protokv.testing.memories")

from protokv.testing.memories import MemoryTests as MemoryTests  # noqa: E402
from protokv.testing.streams import ToyStream as ToyStream  # noqa: E402
from protokv.testing.streams import make_shape as make_shape  # noqa: E402
