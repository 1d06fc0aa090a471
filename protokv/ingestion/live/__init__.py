"""Live sources: read them, wait for them, and go on after a loss."""
