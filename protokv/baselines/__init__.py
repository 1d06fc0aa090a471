"""Memories to compare with; each file holds one, names its source and lists the differences."""
