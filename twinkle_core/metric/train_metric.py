"""How far training is, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from twinkle_core.metric.base import Metric


class TrainMetric(Metric):
    """`step`, `lr` and `grad_norm` of the last optimizer step, `steps_per_second` since the last numbers, `total_seconds` since the start.

    All ranks take the same steps: what another rank saw is not added.
    """

    when = "step"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._start = self._since = clock()

    def accumulate(self, *, step: int, lr: float, grad_norm: float | None = None) -> None:
        self._sums = {"num_steps": self._sums.get("num_steps", 0) + 1, "step": step, "lr": lr}
        if grad_norm is not None:
            self._sums["grad_norm"] = grad_norm

    def sums(self) -> dict[str, float]:
        now = self._clock()
        return {**super().sums(), "seconds": now - self._since, "total_seconds": now - self._start}

    def merge(self, sums: Mapping[str, float]) -> None:
        pass

    def reset(self) -> None:
        super().reset()
        self._since = self._clock()

    def numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        if "num_steps" not in sums:
            return {}
        found = {name: sums[name] for name in ("step", "lr", "grad_norm", "total_seconds") if name in sums}
        return found | ({"steps_per_second": sums["num_steps"] / sums["seconds"]} if sums["seconds"] else {})
