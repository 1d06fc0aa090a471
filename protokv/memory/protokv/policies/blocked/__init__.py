"""The blocked rule: Ward's merges planned in blocks, in bounded, fixed work (`rule`)."""
