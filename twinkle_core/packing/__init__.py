"""Which documents share a row."""

from twinkle_core.packing.best_fit_decreasing import pack
from twinkle_core.packing.run import plan

__all__ = ["pack", "plan"]
