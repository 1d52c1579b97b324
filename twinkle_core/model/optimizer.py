"""The optimizer with its schedule, and their state as named tensors and plain values. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.scheduler import lr_factor

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate over optimizer steps."""

    name: str
    num_training_steps: int
    num_warmup_steps: int

    def factor(self, step: int) -> float:
        return lr_factor(self.name, step, self.num_training_steps, self.num_warmup_steps)


class Optimizer:
    """Fused AdamW (https://arxiv.org/abs/1711.05101) over named parameters. Its state exists, as zeros, from the start."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        if name != "AdamW":
            raise ConfigError(f"optimizer is {name!r}; known: AdamW")
        self.settings = {"name": name, "groups": [{"lr": lr, "weight_decay": weight_decay, "betas": list(betas), "eps": eps}]}
        self._parameters = dict(parameters)
        self._lr = lr
        self._adamw = torch.optim.AdamW(list(self._parameters.values()), lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)
        for parameter in self._parameters.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def lr(self, schedule: Schedule | None, step: int) -> float:
        """Learning rate of optimizer step `step`, from 0."""
        return self._lr * (schedule.factor(step) if schedule else 1.0)

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live state: `<parameter>.exp_avg`, `<parameter>.exp_avg_sq`, `<parameter>.step` of each parameter."""
        return {f"{name}.{key}": self._adamw.state[parameter][key] for name, parameter in self._parameters.items() for key in STATE_NAMES}


def schedule_settings(schedule: Schedule | None) -> dict[str, Any] | None:
    return asdict(schedule) if schedule else None
