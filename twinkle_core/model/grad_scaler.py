"""The scale of a float16 loss. Imports nothing: the decision to skip a step falls on the global gradient norm, which every rank has."""

from __future__ import annotations

import math
from typing import Any

from twinkle_core.errors import ConfigError, TrainingError

SMALLEST_SCALE = 2.0**-14
"""Below it a gradient that still overflows is no matter of scale."""


class LossScaler:
    """torch.amp.GradScaler's rule (https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling), with a state of two numbers.

    A step whose gradient is not finite is skipped and the scale is multiplied by `backoff_factor`; after `growth_interval`
    steps in a row it is multiplied by `growth_factor`. The losses here are sums over tokens, not means, so `init_scale` is
    2**10 where torch's is 2**16.
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**10,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if init_scale <= 0 or growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ConfigError(
                f"grad scaler: init_scale {init_scale} must be above 0, growth_factor {growth_factor} above 1, "
                f"backoff_factor {backoff_factor} between 0 and 1, growth_interval {growth_interval} at least 1"
            )
        self.settings: dict[str, Any] = {
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "enabled": enabled,
        }
        self.scale = float(init_scale) if enabled else 1.0
        self.good_steps = 0
        self.num_skipped = 0

    def update(self, *, is_finite: bool) -> None:
        """After a step (`is_finite`) or in place of one. Raises `TrainingError` once no scale helps."""
        if not is_finite:
            self.num_skipped += 1
            self.scale *= self.settings["backoff_factor"] if self.settings["enabled"] else 1.0
            self.good_steps = 0
            if self.scale < SMALLEST_SCALE or not self.settings["enabled"]:
                raise TrainingError(f"gradients are not finite at a loss scale of {self.scale:g}: look at the rows and the learning rate")
            return
        self.good_steps += 1
        if self.settings["enabled"] and self.good_steps == self.settings["growth_interval"]:
            grown = self.scale * self.settings["growth_factor"]
            self.scale, self.good_steps = (grown if math.isfinite(grown) else self.scale), 0

    def state(self) -> dict[str, float | int]:
        return {"scale": self.scale, "good_steps": self.good_steps, "num_skipped": self.num_skipped}

    def load(self, state: dict[str, float | int]) -> None:
        self.scale, self.good_steps, self.num_skipped = float(state["scale"]), int(state["good_steps"]), int(state["num_skipped"])
