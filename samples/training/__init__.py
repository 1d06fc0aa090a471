"""How the weights of the embedded model are made: clips, curriculum, loop and export. Not part of the wheel."""
