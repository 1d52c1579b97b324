"""Group relative policy optimization, and what the losses of its family share. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import Loss, LossInputs, LossOutput, ModelOutputs, Need, Unit

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within it, so that no ratio overflows."""


@dataclass(frozen=True, kw_only=True)
class GRPOLoss(Loss):
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta k3 - entropy_coef H; https://arxiv.org/abs/2402.03300, eq. 3 and 4.

    A mean over the tokens of a sequence, then over sequences. r = exp(log_probs - old_log_probs); k3 = exp(d) - d - 1 with
    d = ref - log_probs, http://joschu.net/blog/kl-approx.html; H is the entropy. `epsilon_high`: https://arxiv.org/abs/2503.14476.
    A token of weight w counts w times. Sequences without a supervised token count neither in the sum nor in the number.
    """

    unit: ClassVar[Unit] = "sequence"

    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None takes epsilon."""
    beta: float = 0.0
    """Weight of the KL term; above 0 the reference's log-probabilities are needed."""
    entropy_coef: float = 0.0
    on_policy: bool = False
    """The policy has not moved since it sampled: r is 1 with the gradient of log_probs, and old log-probabilities are not needed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon >= 0 or not self.upper >= 1:
            raise ConfigError(f"epsilon is {self.epsilon}, epsilon_high {self.epsilon_high}; they are 0 or more")
        if not self.beta >= 0:
            raise ConfigError(f"beta is {self.beta}; it is 0 or more")

    @property
    def upper(self) -> float:
        """Largest ratio that still has a gradient where the advantage is positive."""
        return 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"log_probs", "entropies"} if self.entropy_coef else {"log_probs"})

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        log_probs = self.log_probs(inputs, outputs)
        log_ratios = self.log_ratios(inputs, log_probs)
        losses = self.policy_losses(log_ratios.exp(), self.advantages(inputs), log_probs)
        if self.beta:
            reference = self.given(inputs.ref_log_probs, "ref_log_probs", f" for beta={self.beta}").detach()
            distance = (reference - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            losses = losses + self.beta * (distance.exp() - distance - 1)
        if self.entropy_coef:
            losses = losses - self.entropy_coef * self.given(outputs.entropies, "entropies")
        return self.output(inputs, self.aggregate(inputs, losses))

    def advantages(self, inputs: LossInputs) -> torch.Tensor:
        """[S] advantage of each token."""
        if inputs.token_advantages is not None:
            return inputs.token_advantages
        return self.given(inputs.advantages, "advantages")[inputs.documents]

    def log_ratios(self, inputs: LossInputs, log_probs: torch.Tensor) -> torch.Tensor:
        """[S] log of the ratio that weighs each token."""
        old = log_probs if self.on_policy else self.given(inputs.old_log_probs, "old_log_probs", ", or on_policy=True")
        return (log_probs - old.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def policy_losses(self, ratios: torch.Tensor, advantages: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """[S] loss of each token, before the KL and entropy terms."""
        return -torch.minimum(ratios * advantages, ratios.clamp(1 - self.epsilon, self.upper) * advantages)

    def aggregate(self, inputs: LossInputs, losses: torch.Tensor) -> torch.Tensor:
        """Sum over the micro-batch, to be divided by the batch's weight."""
        return inputs.document_means(losses).sum()
