"""Log-probabilities of labels, entropies of predictions: what losses over policies are made of. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.loss.cross_entropy import _chunk_rows, _wide, token_losses


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """[S] log-probability in nats of each label under softmax(logits / temperature), float32; 0 where the label is `IGNORE`.

    A policy sampled at a temperature is that distribution, so its log-probabilities must be taken at the same one
    (https://github.com/huggingface/trl/issues/4159). Example: logits `[log 3, 0]`, label 0: log 0.75 at 1, log 0.9 at 0.5.
    """
    if temperature <= 0:
        raise ConfigError(f"temperature is {temperature}; it is above 0 (a greedy choice has no log-probability)")
    return -token_losses(logits if temperature == 1.0 else logits / temperature, labels)


def token_entropies(logits: torch.Tensor) -> torch.Tensor:
    """[S] entropy in nats of softmax(logits) of [S, V], float32 (float64 in float64), in chunks forwards and backwards.

    H = -sum p log p (https://en.wikipedia.org/wiki/Entropy_(information_theory)). Example: four equal logits give log 4 = 1.3863.
    """
    entropies: torch.Tensor = _TokenEntropies.apply(logits)  # type: ignore[no-untyped-call]
    return entropies


class _TokenEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        entropies = torch.cat([_entropies(chunk)[0] for chunk in logits.split(_chunk_rows(logits))])
        ctx.save_for_backward(logits)
        return entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        grad, rows = torch.empty_like(logits), _chunk_rows(logits)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            entropies, log_probs = _entropies(logits[part])
            # dH/dz_j = -p_j (log p_j + H)
            grad[part] = -log_probs.exp() * (log_probs.clamp_min(_FLOOR) + entropies[:, None]) * grads[0][part, None]
        return grad


_FLOOR = -1e4
"""Stands for log 0 beside a probability of 0, so that 0 times it is 0."""


def _entropies(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = _wide(logits).log_softmax(dim=-1)
    return -(log_probs.exp() * log_probs.clamp_min(_FLOOR)).sum(dim=-1), log_probs
