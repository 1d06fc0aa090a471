"""Literal forms of the fast paths: slow, and written to be read."""
