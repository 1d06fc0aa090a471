"""Train the weights of the embedded model: clips, curricula, loops and export. Not part of the
wheel.
"""
