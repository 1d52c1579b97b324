"""How far a policy has moved from the one that sampled, and how often its loss is clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from twinkle_core.metric.base import Inputs, LossValue, Metric, Outputs, means

if TYPE_CHECKING:
    import torch


class GRPOMetric(Metric):
    """Means over tokens by their weight, of the raw ratio r = pi / pi_old before any clip.

    `ratio`; `kl` = r - 1 - log r and, where there is a reference, `kl_ref` = e^d - d - 1 with d = log ref - log pi (k3,
    http://joschu.net/blog/kl-approx.html); `clip_fraction_low` and `clip_fraction_high`, the share whose gradient the clip takes away:
    r < 1 - epsilon with a negative advantage, r > 1 + epsilon_high with a positive one; `entropy` where the outputs have it.
    """

    needs = frozenset({"log_probs"})
    NAMES = ("ratio", "kl", "kl_ref", "clip_fraction_low", "clip_fraction_high", "entropy")

    def __init__(self, epsilon: float = 0.2, epsilon_high: float | None = None) -> None:
        super().__init__()
        self.low, self.high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)

    def accumulate(self, inputs: Inputs, outputs: Outputs, loss: LossValue | None = None) -> None:
        log_probs = self.given(outputs.log_probs, "log_probs")
        log_ratios = log_probs - self.given(inputs.old_log_probs, "old_log_probs")
        self._add_mean(inputs, "kl", log_ratios.exp() - 1 - log_ratios)
        ratios = self.ratios(inputs, log_ratios)
        low, high = self.clipped(ratios, self._advantages(inputs))
        for name, value in (("ratio", ratios), ("clip_fraction_low", low), ("clip_fraction_high", high)):
            self._add_mean(inputs, name, value.to(log_ratios.dtype))
        if inputs.ref_log_probs is not None:
            distance = inputs.ref_log_probs.detach() - log_probs
            self._add_mean(inputs, "kl_ref", distance.exp() - distance - 1)
        if outputs.entropies is not None:
            self._add_mean(inputs, "entropy", outputs.entropies.detach())
        self.add("weight", sum(inputs.document_weights))
        self.add("num_sequences", sum(weight > 0 for weight in inputs.document_weights))

    def ratios(self, inputs: Inputs, log_ratios: torch.Tensor) -> torch.Tensor:
        """[S] the ratio that weighs each token."""
        return log_ratios.exp()

    def clipped(self, ratios: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S] bool, [S] bool: which tokens are clipped from below and from above."""
        return (ratios < self.low) & (advantages < 0), (ratios > self.high) & (advantages > 0)

    def numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        return means(sums, "weight", self.NAMES)

    def _advantages(self, inputs: Inputs) -> torch.Tensor:
        if inputs.token_advantages is not None:
            return inputs.token_advantages
        return self.given(inputs.advantages, "advantages")[inputs.documents]

    def _add_mean(self, inputs: Inputs, name: str, values: torch.Tensor) -> None:
        self.add(name, inputs.weighted(values).sum())


class GSPOMetric(GRPOMetric):
    """The same for GSPO, https://arxiv.org/abs/2507.18071: `ratio` and the clip fractions are of sequences, the rest of tokens."""

    SEQUENCE_NAMES = ("ratio", "clip_fraction_low", "clip_fraction_high")

    def ratios(self, inputs: Inputs, log_ratios: torch.Tensor) -> torch.Tensor:
        return inputs.document_means(log_ratios)[inputs.documents].exp()

    def numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        tokens = [name for name in self.NAMES if name not in self.SEQUENCE_NAMES]
        return means(sums, "num_sequences", self.SEQUENCE_NAMES) | means(sums, "weight", tokens)

    def _add_mean(self, inputs: Inputs, name: str, values: torch.Tensor) -> None:
        if name in self.SEQUENCE_NAMES:
            self.add(name, inputs.document_means(values).sum())
        else:
            super()._add_mean(inputs, name, values)


class CISPOMetric(GRPOMetric):
    """The same for CISPO, https://arxiv.org/abs/2506.13585, which bounds r whatever the advantage; below only with `epsilon_low`."""

    def __init__(self, epsilon: float = 0.2, epsilon_high: float | None = None, epsilon_low: float | None = None) -> None:
        super().__init__(epsilon, epsilon_high)
        self.low = 0.0 if epsilon_low is None else 1 - epsilon_low

    def clipped(self, ratios: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ratios < self.low, ratios > self.high
