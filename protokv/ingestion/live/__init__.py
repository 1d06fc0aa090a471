"""Live sources: reading, waiting, going on after a loss."""
