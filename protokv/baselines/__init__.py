"""Memories to compare with; each file holds one, names its source and says what differs from it."""
