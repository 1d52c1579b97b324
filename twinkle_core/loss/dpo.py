"""Direct preference optimization and its kin with a reference model. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs
from twinkle_core.loss.preference import PairLogProbs, PreferenceLoss

LOSS_TYPES = ("sigmoid", "hinge", "ipo", "kto_pair")


@dataclass(frozen=True, kw_only=True)
class DPOLoss(PreferenceLoss):
    """A mean over pairs, of the margin m = (pi_c - ref_c) - (pi_r - ref_r) of log-likelihoods summed over tokens.

    - sigmoid: -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), e the `label_smoothing`. https://arxiv.org/abs/2305.18290, eq. 7;
      with e https://ericmitchell.ai/cdpo.pdf.
    - hinge: max(0, 1 - beta m). https://arxiv.org/abs/2309.06657 (SLiC https://arxiv.org/abs/2305.10425 with a reference).
    - ipo: (m - 1 / (2 beta))^2. https://arxiv.org/abs/2310.12036, eq. 17. Twinkle squares beta m - 1 / (2 beta): beta enters twice.
    - kto_pair: the mean of 1 - sigmoid(beta (pi_c - ref_c - z)) and 1 - sigmoid(beta (z - pi_r + ref_r)), z = `LossInputs.kl`, 0
      without it. https://arxiv.org/abs/2402.01306, eq. 8, on pairs.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    """Probability that a pair's labels are swapped; for sigmoid."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = "sigmoid"
    reference_free: bool = False
    """The reference is the uniform policy: its log-likelihoods are taken as 0."""
    sft_weight: float = 0.0
    """Weight of the chosen document's negative log-likelihood a token, https://arxiv.org/abs/2404.19733, eq. 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in LOSS_TYPES:
            raise ConfigError(f"loss_type is {self.loss_type!r}; known: {', '.join(LOSS_TYPES)}")
        if not self.beta > 0:
            raise ConfigError(f"beta is {self.beta}; it is above 0")
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.loss_type != "sigmoid"):
            raise ConfigError(f"label_smoothing is {self.label_smoothing} for {self.loss_type}; it lies in [0, 0.5), and is for sigmoid")
        if not self.sft_weight >= 0:
            raise ConfigError(f"sft_weight is {self.sft_weight}; it is 0 or more")

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        log_probs = self.log_probs(inputs, outputs)
        ratios = log_probs
        if not self.reference_free:
            ratios = log_probs - self.given(inputs.ref_log_probs, "ref_log_probs", ", or reference_free=True").detach()
        losses = self._losses(self.summed(inputs, ratios), inputs.kl)
        if self.sft_weight:
            losses = losses - self.sft_weight * self.averaged(inputs, log_probs).chosen
        return self.output(inputs, losses.sum())

    def _losses(self, ratios: PairLogProbs, kl: float | torch.Tensor | None) -> torch.Tensor:
        scaled = self.beta * ratios.margin
        if self.loss_type == "sigmoid":
            return -(1 - self.label_smoothing) * logsigmoid(scaled) - self.label_smoothing * logsigmoid(-scaled)
        if self.loss_type == "hinge":
            return (1 - scaled).clamp_min(0)
        if self.loss_type == "ipo":
            return (ratios.margin - 1 / (2 * self.beta)) ** 2
        point = 0.0 if kl is None else kl
        liked = torch.sigmoid(self.beta * (ratios.chosen - point))
        disliked = torch.sigmoid(self.beta * (point - ratios.rejected))
        return 1 - (liked + disliked) / 2
