"""What a preference loss does to the two sides of a pair."""

from __future__ import annotations

from collections.abc import Mapping

from twinkle_core.metric.base import Inputs, LossValue, Metric, Outputs, means
from twinkle_core.types import DocumentKind


class DPOMetric(Metric):
    """Means over pairs, rewards being beta (log pi - log ref) of a document, https://arxiv.org/abs/2305.18290, section 4.

    `rewards_chosen`, `rewards_rejected`, `rewards_margin`, `rewards_accuracy` (chosen above rejected; a tie is not), and the
    log-likelihoods `log_probs_chosen`, `log_probs_rejected`. `reference_free` leaves ref out.
    """

    needs = frozenset({"log_probs"})
    NAMES = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy", "log_probs_chosen", "log_probs_rejected")

    def __init__(self, beta: float = 0.1, reference_free: bool = False) -> None:
        super().__init__()
        self.beta, self.reference_free = beta, reference_free

    def accumulate(self, inputs: Inputs, outputs: Outputs, loss: LossValue | None = None) -> None:
        log_probs = self.given(outputs.log_probs, "log_probs")
        ratios = log_probs if self.reference_free else log_probs - self.given(inputs.ref_log_probs, "ref_log_probs")
        documents = zip(inputs.kinds, inputs.document_weights, strict=True)
        chosen = [number for number, (kind, weight) in enumerate(documents) if kind == DocumentKind.CHOSEN and weight > 0]
        rejected = [number + 1 for number in chosen]
        rewards, sums = self.beta * inputs.document_sums(ratios), inputs.document_sums(log_probs)
        margins = rewards[chosen] - rewards[rejected]
        values = (rewards[chosen], rewards[rejected], margins, margins > 0, sums[chosen], sums[rejected])
        for name, value in zip(self.NAMES, values, strict=True):
            self.add(name, value.sum())
        self.add("num_pairs", len(chosen))

    def numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        return means(sums, "num_pairs", self.NAMES)
