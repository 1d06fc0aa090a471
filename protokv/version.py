"""The version of the package: read by the build, the command line and every state that is written."""

__version__ = "0.1.0"
