"""A schedule by name, class or function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from twinkle_core.errors import ConfigError
from twinkle_core.scheduler.constant_warmup import constant_warmup
from twinkle_core.scheduler.cosine_warmup import cosine_warmup
from twinkle_core.scheduler.linear_warmup import linear_warmup
from twinkle_core.scheduler.torch_schedules import NEED_SCHEDULERS, REPLAYED, TORCH_SCHEDULES
from twinkle_core.scheduler.transformers_schedules import TRANSFORMERS_SCHEDULES
from twinkle_core.scheduler.wrapped import MetricSchedule, ReplayedSchedule

OWN: Mapping[str, Callable[..., float]] = {
    "CosineWarmupScheduler": cosine_warmup,
    "LinearWarmupScheduler": linear_warmup,
    "ConstantWarmupScheduler": constant_warmup,
}
BY_METRIC = ("ReduceLROnPlateau", "reduce_lr_on_plateau", "greedy")
COUNTS = ("step_size", "total_iters", "T_max", "T_0", "T_mult", "num_training_steps")
KNOWN = (*OWN, *TORCH_SCHEDULES, *REPLAYED, *TRANSFORMERS_SCHEDULES, *BY_METRIC)


class StepSchedule(Protocol):
    """Learning rate over optimizer steps. A `MetricSchedule` also has `observe`, `state` and `load_state`."""

    @property
    def needs_metric(self) -> bool: ...

    def factor(self, step: int) -> float:
        """Factor of the optimizer's rate at optimizer step `step`, from 0."""
        ...


class FunctionSchedule:
    """A function of the step; it has no state."""

    needs_metric = False

    def __init__(self, function: Callable[[int], float]) -> None:
        self._function = function

    def factor(self, step: int) -> float:
        return self._function(step)


def build_schedule(
    scheduler: str | type[Any] | Callable[[int], float], arguments: Mapping[str, Any] | None = None, *, lr: float
) -> StepSchedule:
    """The schedule that is meant: one of `KNOWN`, an `LRScheduler` class (its steps are replayed), or a function step -> factor.

    `arguments` are those of the class or of transformers' function, without the optimizer and `last_epoch`; `lr` is the optimizer's rate.
    Raises `ConfigError` for unknown names (naming the known) and arguments that do not fit.
    """
    given = dict(arguments or {})
    if not lr > 0:
        raise ConfigError(f"lr is {lr}; it is above 0")
    if isinstance(scheduler, str):
        return _by_name(scheduler, given, lr)
    if isinstance(scheduler, type):
        kind = MetricSchedule if "metrics" in inspect.signature(getattr(scheduler, "step", scheduler)).parameters else ReplayedSchedule
        return kind(scheduler, given, lr)
    if not callable(scheduler):
        raise ConfigError(f"scheduler is {scheduler!r}; give a name, an LRScheduler class or a function step -> factor")
    if given:
        raise ConfigError(f"scheduler {scheduler!r} is a function of the step; it takes no {', '.join(given)}")
    return FunctionSchedule(scheduler)


def check_warmup(num_training_steps: int, num_warmup_steps: int) -> None:
    if num_training_steps < 1 or not 0 <= num_warmup_steps <= num_training_steps:
        needed = "need 0 <= warm-up <= training, training >= 1"
        raise ConfigError(f"{num_warmup_steps} warm-up steps of {num_training_steps} training steps: {needed}")


def _by_name(name: str, given: dict[str, Any], lr: float) -> StepSchedule:
    if name in NEED_SCHEDULERS:
        raise ConfigError(f"{name} is made of schedulers that hold an optimizer; give a function step -> factor that does the same")
    if name in REPLAYED:
        import torch

        return ReplayedSchedule(getattr(torch.optim.lr_scheduler, name), given, lr)
    if name in BY_METRIC:
        return MetricSchedule(_metric_class(name), given, lr)
    functions = {**OWN, **TORCH_SCHEDULES, **TRANSFORMERS_SCHEDULES}
    if name not in functions:
        raise ConfigError(f"scheduler is {name!r}; known: {', '.join(KNOWN)}")
    function = functions[name]
    parameters = inspect.signature(function).parameters
    taken = [key for key in parameters if key not in ("step", "lr")]
    if unknown := [key for key in given if key not in taken]:
        raise ConfigError(f"{name} takes no {unknown[0]!r}; known: {', '.join(taken) or 'none'}")
    if missing := [key for key in taken if parameters[key].default is inspect.Parameter.empty and key not in given]:
        raise ConfigError(f"{name} needs {', '.join(missing)}")
    if name in OWN:
        check_warmup(given["num_training_steps"], given["num_warmup_steps"])
    for key, value in given.items():
        if key in ("step_size", "total_iters", "T_max", "T_0", "T_mult", "num_training_steps") and not (
            isinstance(value, int) and value >= 1
        ):
            raise ConfigError(f"{name}: {key} is {value!r}; it is a whole number, at least 1")
    schedule = FunctionSchedule(partial(function, **given, **({"lr": lr} if "lr" in parameters else {})))
    schedule.factor(0)  # what does not fit is said now
    return schedule


def _metric_class(name: str) -> type[Any]:
    if name == "greedy":
        from transformers.optimization import GreedyLR

        greedy: type[Any] = GreedyLR
        return greedy
    import torch

    return torch.optim.lr_scheduler.ReduceLROnPlateau
