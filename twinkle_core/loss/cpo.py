"""Contrastive preference optimization. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import logsigmoid

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs
from twinkle_core.loss.preference import PreferenceLoss


@dataclass(frozen=True, kw_only=True)
class CPOLoss(PreferenceLoss):
    """-log sigmoid(beta (lp_c - lp_r)) - bc_coef lp_c, a mean over pairs; lp are log-likelihoods summed over a document's tokens.

    https://arxiv.org/abs/2401.08417, where both terms are expectations over pairs of log pi(y|x).
    """

    beta: float = 0.1
    bc_coef: float = 1.0
    """Weight of the chosen document's negative log-likelihood (behaviour cloning)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0 or not self.bc_coef >= 0:
            raise ConfigError(f"beta is {self.beta}, bc_coef {self.bc_coef}; beta is above 0, bc_coef 0 or more")

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        sums = self.summed(inputs, self.log_probs(inputs, outputs))
        return self.output(inputs, (-logsigmoid(self.beta * sums.margin) - self.bc_coef * sums.chosen).sum())
