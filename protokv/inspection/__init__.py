"""Looking at states: describe, compare, convert."""
