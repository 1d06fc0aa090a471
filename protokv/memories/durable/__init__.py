"""The default memory: a near window, and a bank of what older tokens have in common (`rule`)."""
