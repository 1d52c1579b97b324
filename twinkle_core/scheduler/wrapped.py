"""torch schedulers run on an optimizer of their own, for the rates that they set. torch is imported when one is built."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    import torch


class ReplayedSchedule:
    """Factors of any `LRScheduler` class whose rate depends on the number of its steps alone. There is no state: the step says it all."""

    needs_metric = False

    def __init__(self, scheduler: type[Any], arguments: Mapping[str, Any], lr: float) -> None:
        self._optimizer, self._lr = _optimizer(lr), lr
        self._untouched = _settings(self._optimizer)
        self._scheduler = _made(scheduler, self._optimizer, arguments)
        self._name = scheduler.__name__
        self._factors = [self._seen()]

    def factor(self, step: int) -> float:
        """Factor at optimizer step `step`, from 0: after as many steps of the scheduler."""
        while len(self._factors) <= step:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # no optimizer step between two: there is nothing to optimize
                    self._scheduler.step()
            except ValueError as error:
                raise TrainingError(f"{self._name} has no rate for optimizer step {len(self._factors)}: {error}") from None
            self._factors.append(self._seen())
        return self._factors[step]

    def _seen(self) -> float:
        if _settings(self._optimizer) != self._untouched:
            raise ConfigError(f"{self._name} changes the optimizer's momentum too; only rates are scheduled: pass cycle_momentum=False")
        return float(self._optimizer.param_groups[0]["lr"]) / self._lr


class MetricSchedule:
    """A scheduler that follows a metric: `observe` takes the metric, and the factor holds until the next one."""

    needs_metric = True

    def __init__(self, scheduler: type[Any], arguments: Mapping[str, Any], lr: float) -> None:
        self._optimizer, self._lr, self._name = _optimizer(lr), lr, scheduler.__name__
        self._scheduler = _made(scheduler, self._optimizer, arguments)

    def factor(self, step: int) -> float:
        """The factor now, whatever the step."""
        return float(self._optimizer.param_groups[0]["lr"]) / self._lr

    def observe(self, metric: float) -> None:
        if not math.isfinite(metric):
            raise TrainingError(f"{self._name} was given the metric {metric}; it follows finite numbers")
        self._scheduler.step(metric)

    def state(self) -> dict[str, Any]:
        """Plain JSON; infinities as text."""
        inner = {name: value for name, value in self._scheduler.state_dict().items() if not callable(value)}
        state: dict[str, Any] = _to_json({"lr": self._optimizer.param_groups[0]["lr"], "scheduler": inner})
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        read = _from_json(state)
        self._scheduler.load_state_dict(read["scheduler"])
        self._optimizer.param_groups[0]["lr"] = read["lr"]


def _optimizer(lr: float) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr)


def _settings(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    return tuple(optimizer.param_groups[0][name] for name in ("betas", "weight_decay", "eps"))


def _made(scheduler: type[Any], optimizer: torch.optim.Optimizer, arguments: Mapping[str, Any]) -> Any:
    try:
        return scheduler(optimizer, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{scheduler.__name__} with {dict(arguments)}: {error}") from None


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _to_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _from_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_from_json(part) for part in value]
    return float(value) if value in ("inf", "-inf") else value
