"""Clipped importance-sampling policy optimization: no token loses its gradient. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import LossInputs, Unit
from twinkle_core.loss.grpo import GRPOLoss


@dataclass(frozen=True, kw_only=True)
class CISPOLoss(GRPOLoss):
    """-sg(clip(r, 1 - epsilon_low, 1 + epsilon_high)) A log pi, a mean over the batch's tokens; https://arxiv.org/abs/2506.13585.

    Without `epsilon_low` there is no lower bound: the paper's practice, and the form min(r, 1 + epsilon_high). The other form in use,
    min(r, epsilon_max) of https://arxiv.org/abs/2510.13786, is epsilon_high = epsilon_max - 1. Twinkle ignores epsilon_high.
    """

    unit: ClassVar[Unit] = "token"

    epsilon_low: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon_low is not None and not 0 <= self.epsilon_low <= 1:
            raise ConfigError(f"epsilon_low is {self.epsilon_low}; it lies in [0, 1], or is None")

    def policy_losses(self, ratios: torch.Tensor, advantages: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        lower = 0.0 if self.epsilon_low is None else 1 - self.epsilon_low
        return -ratios.detach().clamp(lower, self.upper) * advantages * log_probs

    def aggregate(self, inputs: LossInputs, losses: torch.Tensor) -> torch.Tensor:
        return inputs.weighted(losses).sum()
