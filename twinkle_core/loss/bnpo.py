"""GRPO's token loss as a mean over the tokens of the batch. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from twinkle_core.loss.base import LossInputs, Unit
from twinkle_core.loss.grpo import GRPOLoss


@dataclass(frozen=True, kw_only=True)
class BNPOLoss(GRPOLoss):
    """GRPO's token losses, a mean over all tokens of the global batch: each token counts alike, however long its sequence.

    https://arxiv.org/abs/2503.14476 (DAPO's token-level loss). Twinkle and TRL divide by the tokens of the local batch.
    """

    unit: ClassVar[Unit] = "token"

    def aggregate(self, inputs: LossInputs, losses: torch.Tensor) -> torch.Tensor:
        return inputs.weighted(losses).sum()
