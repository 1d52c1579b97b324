"""Group sequence policy optimization: one ratio a sequence. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinkle_core.loss.base import LossInputs
from twinkle_core.loss.grpo import GRPOLoss


@dataclass(frozen=True, kw_only=True)
class GSPOLoss(GRPOLoss):
    """GRPO with r = exp(mean over the sequence's tokens of log_probs - old_log_probs); https://arxiv.org/abs/2507.18071.

    Where tokens have advantages of their own, r_t = sg(r) pi_t / sg(pi_t) (GSPO-token). The paper clips at about
    epsilon 3e-4 and epsilon_high 4e-4: a mean log-ratio is far smaller than a token's. The defaults are GRPO's, as in Twinkle.
    """

    def log_ratios(self, inputs: LossInputs, log_probs: torch.Tensor) -> torch.Tensor:
        means = inputs.document_means(super().log_ratios(inputs, log_probs))[inputs.documents]
        return means if inputs.token_advantages is None else means.detach() + log_probs - log_probs.detach()
