"""Learning rate over optimizer steps, as pure functions step -> factor of the peak rate.

Step k counts from 0. Warm-up gives (k + 1) / num_warmup_steps, so that no step is taken at rate 0 (Twinkle and
transformers start at 0 and waste the first step), and decay reaches 0 only after the last step.
Steps are optimizer steps, not micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from twinkle_core.errors import ConfigError
from twinkle_core.scheduler.constant_warmup import constant_warmup
from twinkle_core.scheduler.cosine_warmup import cosine_warmup
from twinkle_core.scheduler.linear_warmup import linear_warmup

SCHEDULERS: Mapping[str, Callable[[int, int, int], float]] = MappingProxyType(
    {"CosineWarmupScheduler": cosine_warmup, "LinearWarmupScheduler": linear_warmup, "ConstantWarmupScheduler": constant_warmup}
)


def lr_factor(scheduler: str, step: int, num_training_steps: int, num_warmup_steps: int) -> float:
    """Factor of the peak learning rate at optimizer step `step` (from 0), by the scheduler's name."""
    if scheduler not in SCHEDULERS:
        raise ConfigError(f"scheduler is {scheduler!r}; known: {', '.join(SCHEDULERS)}")
    if num_training_steps < 1 or not 0 <= num_warmup_steps <= num_training_steps:
        needed = "need 0 <= warm-up <= training, training >= 1"
        raise ConfigError(f"{num_warmup_steps} warm-up steps of {num_training_steps} training steps: {needed}")
    return SCHEDULERS[scheduler](step, num_training_steps, num_warmup_steps)


__all__ = ["SCHEDULERS", "constant_warmup", "cosine_warmup", "linear_warmup", "lr_factor"]
