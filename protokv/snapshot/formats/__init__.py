"""The forms that a state can have, one file a form; `protokv.snapshot.api` finds them by suffix or URL."""
