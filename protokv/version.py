"""The version of the package, in a file that every room may import."""

__version__ = "0.1.0"
