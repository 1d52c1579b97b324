"""Soft adaptive policy optimization: a smooth gate in place of the clip. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.loss.grpo import GRPOLoss


@dataclass(frozen=True, kw_only=True)
class SAPOLoss(GRPOLoss):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A; https://arxiv.org/abs/2511.20347.

    A mean over tokens, then over sequences. epsilon and epsilon_high have no effect here. The paper takes tau_neg 1.05, Twinkle 1.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not min(self.tau_pos, self.tau_neg) > 0:
            raise ConfigError(f"tau_pos is {self.tau_pos}, tau_neg {self.tau_neg}; they are above 0")

    def policy_losses(self, ratios: torch.Tensor, advantages: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg).to(ratios.dtype)
        return -(4 / tau) * torch.sigmoid(tau * (ratios - 1)) * advantages
