"""GRPO done right: no division by a sequence's own length. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import LossInputs
from twinkle_core.loss.grpo import GRPOLoss


@dataclass(frozen=True, kw_only=True)
class DRGRPOLoss(GRPOLoss):
    """Sum of GRPO's token losses / (sequences x max_completion_length); https://arxiv.org/abs/2503.20783, section 3.2 and appendix A."""

    max_completion_length: int = 1024
    """Tokens; a constant, so that long answers are not favoured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_completion_length < 1:
            raise ConfigError(f"max_completion_length is {self.max_completion_length}; it is at least 1")

    def aggregate(self, inputs: LossInputs, losses: torch.Tensor) -> torch.Tensor:
        return inputs.weighted(losses).sum() / self.max_completion_length
