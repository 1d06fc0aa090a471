# Verbs of a day's work: `just --list`. Each is one line that can be typed without `just`.

# In a hurry: style, rooms, types and the tests of the house and of all memories, in less than a minute.
quick: style types
    pytest -q -n 2 tests/test_house.py tests/core/test_memories.py tests/memories/test_scored.py tests/memories/test_config.py

# Style, layout of files, and which room imports which.
style:
    ruff check .
    ruff format --check .
    lint-imports

# Types of the package, its tests and the samples.
types:
    mypy

# All tests that are neither slow nor wide, some minutes; `just test tests/core` runs those of one room.
test *what:
    pytest {{ what }}

# The tests of the samples.
samples:
    pytest samples

# Lay out files, write the pages of the reference again, and show the documentation.
docs:
    ruff format .
    python docs/site/reference.py --write
    mkdocs serve -f docs/site/mkdocs.yml

# What must be green before a change lands, from nothing.
gate:
    .ci/run
