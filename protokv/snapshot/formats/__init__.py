"""The forms that a state can have where it is kept: one file a form, and the registry that finds them by suffix or URL."""
