"""The method: a memory of bounded size, its attention, its state, and the session that joins it to
a model.
"""
