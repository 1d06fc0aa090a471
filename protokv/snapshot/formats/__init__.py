"""The forms that a state can have, one file a form, and the registry that finds them by suffix or URL."""
