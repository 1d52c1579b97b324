"""Learning rate over optimizer steps, as pure functions step -> factor of the peak rate.

Step k counts from 0. Warm-up gives (k + 1) / num_warmup_steps, so that no step is taken at rate 0 (Twinkle and
transformers start at 0 and waste the first step), and decay reaches 0 only after the last step.
Steps are optimizer steps, not micro-batches. `build_schedule` knows torch's and transformers' schedules too, with their own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from twinkle_core.errors import ConfigError
from twinkle_core.scheduler.build import KNOWN, FunctionSchedule, StepSchedule, build_schedule, check_warmup
from twinkle_core.scheduler.constant_warmup import constant_warmup
from twinkle_core.scheduler.cosine_warmup import cosine_warmup
from twinkle_core.scheduler.linear_warmup import linear_warmup
from twinkle_core.scheduler.wrapped import MetricSchedule, ReplayedSchedule

SCHEDULERS: Mapping[str, Callable[[int, int, int], float]] = MappingProxyType(
    {"CosineWarmupScheduler": cosine_warmup, "LinearWarmupScheduler": linear_warmup, "ConstantWarmupScheduler": constant_warmup}
)


def lr_factor(scheduler: str, step: int, num_training_steps: int, num_warmup_steps: int) -> float:
    """Factor of the peak learning rate at optimizer step `step` (from 0), by the scheduler's name."""
    if scheduler not in SCHEDULERS:
        raise ConfigError(f"scheduler is {scheduler!r}; known: {', '.join(SCHEDULERS)}")
    check_warmup(num_training_steps, num_warmup_steps)
    return SCHEDULERS[scheduler](step, num_training_steps, num_warmup_steps)


__all__ = [
    "KNOWN",
    "SCHEDULERS",
    "FunctionSchedule",
    "MetricSchedule",
    "ReplayedSchedule",
    "StepSchedule",
    "build_schedule",
    "constant_warmup",
    "cosine_warmup",
    "linear_warmup",
    "lr_factor",
]
