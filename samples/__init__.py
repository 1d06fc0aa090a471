"""Walk-throughs, the toy world and the studies on it. Not part of the wheel."""
