"""Schedules by the names of transformers' `get_scheduler` (https://huggingface.co/docs/transformers/main_classes/optimizer_schedules).

Each gives transformers' own factor at optimizer step k, from 0: most start their warm-up at 0, so the first step is taken at rate 0
(our `CosineWarmupScheduler` and its kin do not). `lr` is the optimizer's rate, there where transformers takes a rate in place of a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from twinkle_core.errors import ConfigError


def constant(step: int) -> float:
    return 1.0


def constant_with_warmup(step: int, *, num_warmup_steps: int) -> float:
    return _warmup(step, num_warmup_steps) if step < num_warmup_steps else 1.0


def linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    return max(0.0, 1.0 - _progress(step, num_warmup_steps, num_training_steps))


def cosine(step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5) -> float:
    return _cosine_above(step, num_warmup_steps, num_training_steps, num_cycles, 0.0)


def cosine_with_restarts(step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> float:
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    progress = _progress(step, num_warmup_steps, num_training_steps)
    return 0.0 if progress >= 1 else 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0)))


def polynomial(step: int, *, lr: float, num_warmup_steps: int, num_training_steps: int, lr_end: float = 1e-7, power: float = 1.0) -> float:
    if not lr > lr_end:
        raise ConfigError(f"polynomial: lr_end is {lr_end}; it is below the optimizer's rate {lr}")
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    low = lr_end / lr
    if step > num_training_steps:
        return low
    return float(low + (1 - low) * (1 - _progress(step, num_warmup_steps, num_training_steps)) ** power)


def inverse_sqrt(step: int, *, num_warmup_steps: int, timescale: int | None = None) -> float:
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    scale = timescale if timescale is not None else num_warmup_steps or 10_000
    return 1.0 / math.sqrt((step + scale - num_warmup_steps) / scale)


def cosine_with_min_lr(
    step: int,
    *,
    lr: float,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    """Ends at `min_lr`, or at the factor `min_lr_rate`."""
    low = _lowest(lr, min_lr, min_lr_rate)
    return _cosine_above(step, num_warmup_steps, num_training_steps, num_cycles, low)


def cosine_warmup_with_min_lr(
    step: int,
    *,
    lr: float,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    """Warm-up from `warmup_lr_rate`, else to (k + 1) / num_warmup_steps; no step at rate 0."""
    low = _lowest(lr, min_lr, min_lr_rate)
    if step < num_warmup_steps:
        if warmup_lr_rate is None:
            return (step + 1) / max(1, num_warmup_steps)
        return warmup_lr_rate + (1 - warmup_lr_rate) * step / max(1, num_warmup_steps - 1)
    progress = _progress(step + 1, num_warmup_steps, num_training_steps)
    return max(0.0, _wave(progress, num_cycles) * (1 - low) + low)


def warmup_stable_decay(
    step: int,
    *,
    num_warmup_steps: int,
    num_decay_steps: int,
    num_training_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Up, level, down; `num_stable_steps`, else what the other two leave of `num_training_steps`."""
    for name, value in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if value not in ("linear", "cosine", "1-sqrt"):
            raise ConfigError(f"warmup_stable_decay: {name} is {value!r}; known: linear, cosine, 1-sqrt")
    if num_stable_steps is None:
        if num_training_steps is None:
            raise ConfigError("warmup_stable_decay needs num_stable_steps or num_training_steps")
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
    if step < num_warmup_steps:
        place = _warmup(step, num_warmup_steps)
        risen = {"linear": place, "cosine": 0.5 * (1 - math.cos(math.pi * place)), "1-sqrt": 1 - math.sqrt(1 - place)}
        return max(0.0, risen[warmup_type] * (1 - min_lr_ratio) + min_lr_ratio)
    since = step - num_warmup_steps - num_stable_steps
    if since < 0:
        return 1.0
    if since >= num_decay_steps:
        return min_lr_ratio
    place = since / num_decay_steps
    fallen = {"linear": 1 - place, "cosine": _wave(place, num_cycles), "1-sqrt": 1 - math.sqrt(place)}
    return max(0.0, fallen[decay_type] * (1 - min_lr_ratio) + min_lr_ratio)


def _warmup(step: int, num_warmup_steps: int) -> float:
    return step / max(1, num_warmup_steps)


def _progress(step: int, num_warmup_steps: int, num_training_steps: int) -> float:
    return (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)


def _wave(progress: float, num_cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


def _cosine_above(step: int, num_warmup_steps: int, num_training_steps: int, num_cycles: float, low: float) -> float:
    if step < num_warmup_steps:
        return _warmup(step, num_warmup_steps)
    return max(0.0, _wave(_progress(step, num_warmup_steps, num_training_steps), num_cycles) * (1 - low) + low)


def _lowest(lr: float, min_lr: float | None, min_lr_rate: float | None) -> float:
    if (min_lr is None) == (min_lr_rate is None):
        raise ConfigError(f"min_lr is {min_lr}, min_lr_rate {min_lr_rate}; give one of them")
    return min_lr / lr if min_lr is not None else float(min_lr_rate or 0.0)


TRANSFORMERS_SCHEDULES: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "constant": constant,
        "constant_with_warmup": constant_with_warmup,
        "linear": linear,
        "cosine": cosine,
        "cosine_with_restarts": cosine_with_restarts,
        "polynomial": polynomial,
        "inverse_sqrt": inverse_sqrt,
        "cosine_with_min_lr": cosine_with_min_lr,
        "cosine_warmup_with_min_lr": cosine_warmup_with_min_lr,
        "warmup_stable_decay": warmup_stable_decay,
    }
)
