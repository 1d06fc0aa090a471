"""Dense steps carry true labels."""

from __future__ import annotations

import numpy as np

from samples.training.clips import make_dense_step


def test_dense_labels_say_which_cells_hold_what():
    rng = np.random.default_rng(0)
    filled = 0
    for _ in range(20):
        frames, labels = make_dense_step(rng)
        assert frames.shape == (2, 84, 84, 3)
        assert ((labels[:, 0] == 0) == (labels[:, 1] == 0)).all()
        filled += int((labels[:, 0] > 0).sum())
    assert 20 < filled < 150
