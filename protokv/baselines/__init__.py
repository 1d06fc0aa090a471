"""Other memories to compare with, one file each."""
