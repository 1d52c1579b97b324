"""Kahneman-Tversky optimization: answers judged one by one. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.loss.base import Loss, LossInputs, LossOutput, ModelOutputs
from twinkle_core.types import DocumentKind


@dataclass(frozen=True, kw_only=True)
class KTOLoss(Loss):
    """w_y (1 - sigmoid(s beta (r - z))), a mean over judged documents; https://arxiv.org/abs/2402.01306, eq. 8.

    r is the sum of log pi - log ref; s is 1 for desirable documents and -1 for undesirable ones. z = max(0, `LossInputs.kl`) is the
    batch's estimate of the KL divergence, from answers paired with other prompts (section 4.1 there), made by whoever sees the whole
    batch; no gradient goes through it.
    """

    unit = "sequence"

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    use_kl: bool = True
    """False takes z = 0 (as the authors do for data from another policy), and needs no `kl`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0 or min(self.desirable_weight, self.undesirable_weight) < 0:
            weights = f"weights {self.desirable_weight} and {self.undesirable_weight}"
            raise ConfigError(f"beta is {self.beta}, {weights}; beta is above 0, weights are 0 or more")

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        reference = self.given(inputs.ref_log_probs, "ref_log_probs").detach()
        ratios = inputs.document_sums(self.log_probs(inputs, outputs) - reference)
        signs, weights = [0.0] * inputs.num_documents, [0.0] * inputs.num_documents
        for number in inputs.supervised():
            kind = inputs.kinds[number]
            if kind not in (DocumentKind.DESIRABLE, DocumentKind.UNDESIRABLE):
                raise DataError(f"KTOLoss learns from judged documents, but document {number} is {DocumentKind(kind).name}")
            good = kind == DocumentKind.DESIRABLE
            signs[number], weights[number] = (1.0, self.desirable_weight) if good else (-1.0, self.undesirable_weight)
        gain = inputs.per_document(signs, ratios) * self.beta * (ratios - self._point(inputs, ratios))
        return self.output(inputs, (inputs.per_document(weights, ratios) * (1 - torch.sigmoid(gain))).sum())

    def _point(self, inputs: LossInputs, like: torch.Tensor) -> torch.Tensor:
        if not self.use_kl:
            return like.new_zeros(())
        if inputs.kl is None:
            raise DataError("KTOLoss needs kl, the batch's reference point, or use_kl=False, and none was given")
        return torch.as_tensor(inputs.kl, dtype=like.dtype, device=like.device).detach().clamp_min(0)
