"""Preference optimization without a reference, by the mean log-probability of a token. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import logsigmoid

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs
from twinkle_core.loss.preference import PreferenceLoss


@dataclass(frozen=True, kw_only=True)
class SimPOLoss(PreferenceLoss):
    """-log sigmoid(beta (avg_c - avg_r) - gamma), a mean over pairs; avg is a token's mean log-probability in the document.

    https://arxiv.org/abs/2405.14734, eq. 6.
    """

    beta: float = 2.5
    gamma: float = 0.5
    """By how much the scaled margin is to exceed 0 (not divided by beta)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise ConfigError(f"beta is {self.beta}; it is above 0")

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        averages = self.averaged(inputs, self.log_probs(inputs, outputs))
        return self.output(inputs, -logsigmoid(self.beta * averages.margin - self.gamma).sum())
