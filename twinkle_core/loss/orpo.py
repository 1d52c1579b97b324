"""Odds-ratio preference optimization. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs
from twinkle_core.loss.preference import PreferenceLoss

LARGEST = -1e-6
"""Log-probabilities above it are taken as it: the odds of a certain token are infinite."""


@dataclass(frozen=True, kw_only=True)
class ORPOLoss(PreferenceLoss):
    """-avg_c - lambda_orpo log sigmoid(log odds_c - log odds_r), a mean over pairs; https://arxiv.org/abs/2403.07691, eq. 4, 6 and 7.

    avg is a token's mean log-probability in the document, P = exp(avg), odds = P / (1 - P).
    """

    lambda_orpo: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lambda_orpo >= 0:
            raise ConfigError(f"lambda_orpo is {self.lambda_orpo}; it is 0 or more")

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        averages = self.averaged(inputs, self.log_probs(inputs, outputs))
        log_ratio = _log_odds(averages.chosen) - _log_odds(averages.rejected)
        return self.output(inputs, (-averages.chosen - self.lambda_orpo * logsigmoid(log_ratio)).sum())


def _log_odds(log_probs: torch.Tensor) -> torch.Tensor:
    bounded = log_probs.clamp_max(LARGEST)
    return bounded - torch.log(-torch.expm1(bounded))
