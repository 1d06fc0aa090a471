"""Training is not in the wheel: where the installed package lacks it, it is taken from the checkout."""

from __future__ import annotations

from pathlib import Path

import protokv.mini

CHECKOUT = Path(__file__).parents[2] / "protokv" / "mini"

# Last in line, so that the world, the questions and the weights are still the installed ones.
if str(CHECKOUT) not in protokv.mini.__path__:
    protokv.mini.__path__.append(str(CHECKOUT))
