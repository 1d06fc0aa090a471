"""Look at states without a model: describe, compare, convert."""
