"""Cross-entropy of next tokens, as a sum and a count: whoever knows the whole batch divides, once. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from twinkle_core.types import IGNORE

CHUNK_ELEMENTS = 1 << 22
"""Float32 values in flight at a time (16 MiB), whatever the number of tokens."""


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the token losses in nats (float32 scalar) and number of supervised tokens (int64 scalar).

    As https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html with reduction 'sum', in float32.
    logits [S, V] of any float type, labels [S] int64, `IGNORE` where nothing is to be predicted.
    Example: equal logits over 4 words give log 4 = 1.3863 a token.
    """
    return token_losses(logits, labels).sum(), (labels != IGNORE).sum()


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[S] float32 losses in nats, 0 where the label is `IGNORE`.

    As https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html with reduction 'none'.
    Computed as float32 log-sum-exp in chunks, forwards and backwards: besides the logits and their gradient, both in
    the logits' own type, no [S, V] tensor exists. (torch's own cross-entropy keeps a float32 one for the backward pass.)
    """
    losses: torch.Tensor = _TokenLosses.apply(logits, labels)
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets = labels.clamp_min(0)
        log_norms = torch.cat([chunk.float().logsumexp(dim=-1) for chunk in logits.split(_chunk_rows(logits))])
        ctx.save_for_backward(logits, labels, log_norms)
        losses = log_norms - logits.gather(1, targets[:, None])[:, 0].float()
        return losses.masked_fill(labels == IGNORE, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, log_norms = ctx.saved_tensors
        weights = grads[0].masked_fill(labels == IGNORE, 0.0)
        grad = torch.empty_like(logits)
        rows = _chunk_rows(logits)
        for start in range(0, len(labels), rows):
            part = slice(start, start + rows)
            probabilities = (logits[part].float() - log_norms[part, None]).exp_()
            probabilities.scatter_add_(1, labels[part].clamp_min(0)[:, None], torch.full_like(log_norms[part, None], -1.0))
            grad[part] = probabilities.mul_(weights[part, None])
        return grad, None


def _chunk_rows(logits: torch.Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
