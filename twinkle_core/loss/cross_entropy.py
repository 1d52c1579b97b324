"""Cross-entropy of next tokens, as a sum and a count: whoever knows the whole batch divides, once. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import Loss, LossInputs, LossOutput, ModelOutputs, Need
from twinkle_core.types import IGNORE

CHUNK_ELEMENTS = 1 << 22
"""Float32 values in flight at a time (16 MiB), whatever the number of tokens."""


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss(Loss):
    """-w log p(label), a mean over the tokens' weights w. https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html

    With `dft` each token counts -w sg(p) log p, sg stopping the gradient: dynamic fine-tuning, https://arxiv.org/abs/2508.05629.
    """

    reduction: Literal["mean", "sum"] = "mean"
    """Twinkle's name for what is divided by. Both are divided by the weight of the whole batch here, never by a micro-batch's own."""
    dft: bool = False
    label_smoothing: float = 0.0
    """Share of the target probability that is spread evenly over the whole vocabulary, https://arxiv.org/abs/1512.00567, section 7."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction is {self.reduction!r}; known: mean, sum")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}; it lies in [0, 1)")
        if self.dft and self.label_smoothing:
            raise ConfigError(f"dft weighs the label's own loss: it takes no label_smoothing={self.label_smoothing}")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"logits" if self.label_smoothing else "log_probs"})

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        if self.label_smoothing:
            losses = token_losses(self.given(outputs.logits, "logits"), inputs.labels, label_smoothing=self.label_smoothing)
        else:
            losses = -self.log_probs(inputs, outputs)
        if self.dft:
            losses = losses * (-losses).exp().detach()
        return self.output(inputs, inputs.weighted(losses).sum())


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the token losses in nats (float32 scalar) and number of supervised tokens (int64 scalar).

    As https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html with reduction 'sum', in float32.
    logits [S, V] of any float type, labels [S] int64, `IGNORE` where nothing is to be predicted.
    Example: equal logits over 4 words give log 4 = 1.3863 a token.
    """
    return token_losses(logits, labels).sum(), (labels != IGNORE).sum()


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float = 0.0, chunk_rows: int | None = None
) -> torch.Tensor:
    """[S] float32 losses in nats, 0 where the label is `IGNORE`; float64 for float64 logits.

    As https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html with reduction 'none'.
    Computed as float32 log-sum-exp in chunks (of `chunk_rows` tokens, else by `CHUNK_ELEMENTS`), forwards and backwards: besides the
    logits and their gradient, both in the logits' own type, no [S, V] tensor exists. (torch's own keeps a float32 one for the backward.)
    """
    losses: torch.Tensor = _TokenLosses.apply(logits, labels, label_smoothing, chunk_rows or _chunk_rows(logits))  # type: ignore[no-untyped-call]
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float, rows: int) -> torch.Tensor:
        targets = labels.clamp_min(0)
        log_norms = torch.cat([_wide(chunk).logsumexp(dim=-1) for chunk in logits.split(rows)])
        ctx.save_for_backward(logits, labels, log_norms)
        ctx.label_smoothing, ctx.rows = label_smoothing, rows
        aims = _wide(logits.gather(1, targets[:, None])[:, 0])
        if label_smoothing:
            means = torch.cat([_wide(chunk).mean(dim=-1) for chunk in logits.split(rows)])
            aims = (1 - label_smoothing) * aims + label_smoothing * means
        return (log_norms - aims).masked_fill(labels == IGNORE, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, log_norms = ctx.saved_tensors
        weights = grads[0].masked_fill(labels == IGNORE, 0.0)
        grad = torch.empty_like(logits)
        for start in range(0, len(labels), ctx.rows):
            part = slice(start, start + ctx.rows)
            probabilities = (_wide(logits[part]) - log_norms[part, None]).exp_()
            if ctx.label_smoothing:
                probabilities -= ctx.label_smoothing / logits.shape[1]
            aims = torch.full_like(log_norms[part, None], ctx.label_smoothing - 1.0)
            probabilities.scatter_add_(1, labels[part].clamp_min(0)[:, None], aims)
            grad[part] = probabilities.mul_(weights[part, None])
        return grad, None, None, None


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _chunk_rows(logits: torch.Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
