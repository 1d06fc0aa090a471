"""Training of the embedded model: clips, curriculum, loop and export. Only needed to make the weights again."""
