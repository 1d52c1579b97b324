"""What losses over preference pairs share. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinkle_core.loss.base import Loss, LossInputs


@dataclass(frozen=True, kw_only=True)
class PairLogProbs:
    """Log-likelihoods in nats of P pairs."""

    chosen: torch.Tensor
    """[P] of the chosen documents."""
    rejected: torch.Tensor
    """[P] of the rejected ones."""

    @property
    def margin(self) -> torch.Tensor:
        return self.chosen - self.rejected


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(Loss):
    """A loss over pairs of documents, a chosen one and, next in the row, its rejected one."""

    unit = "pair"

    def summed(self, inputs: LossInputs, log_probs: torch.Tensor) -> PairLogProbs:
        """Log-likelihood of each document: the sum of its [S] `log_probs`, each times its token's weight."""
        return self._of_pairs(inputs, inputs.document_sums(log_probs))

    def averaged(self, inputs: LossInputs, log_probs: torch.Tensor) -> PairLogProbs:
        """The same a token: divided by the sum of the document's weights."""
        return self._of_pairs(inputs, inputs.document_means(log_probs))

    def _of_pairs(self, inputs: LossInputs, values: torch.Tensor) -> PairLogProbs:
        chosen, rejected = self.pairs(inputs)
        indices = torch.tensor([chosen, rejected], dtype=torch.int64).to(values.device, non_blocking=True)
        return PairLogProbs(chosen=values[indices[0]], rejected=values[indices[1]])
