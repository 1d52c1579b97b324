"""Which samples share a row."""

from twinkle_core.packing.best_fit_decreasing import pack
from twinkle_core.packing.packing_plan import PackingPlan
from twinkle_core.packing.run import plan
from twinkle_core.packing.windows import pack_window, pack_windows

__all__ = ["PackingPlan", "pack", "pack_window", "pack_windows", "plan"]
