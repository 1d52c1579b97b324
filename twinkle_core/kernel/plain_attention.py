"""Causal attention of one document by plain products, for what no fused product does: soft-capped logits and sinks. Imports torch.

Soft-capping: c * tanh(logit / c), https://arxiv.org/abs/2408.00118 (Gemma 2). Sinks: a learnt logit of each head that takes its
share of the softmax and gives no value, https://arxiv.org/abs/2508.10925 (gpt-oss).
"""

from __future__ import annotations

import torch
from torch.nn.functional import dropout as drop

QUERY_BLOCK = 512
"""Queries whose logits are made at a time; a sliding window then bounds the keys too."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, H, T, E] from query [1, H, T, D], key [1, K, T, D], value [1, K, T, E], H a multiple of K.

    A query sees at most `window` keys, itself included. `sinks` [H] are logits. The softmax is float32, as in the models' own code.
    Training keeps the weights of all blocks for the backward pass: memory grows with the square of a document's length, or with
    length times window.
    """
    heads, keys, length = query.shape[1], key.shape[1], query.shape[2]
    grouped = query.unflatten(1, (keys, heads // keys))
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        logits = grouped[:, :, :, start:stop] @ key[:, :, None, first:stop].transpose(-1, -2) * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        distance = torch.arange(start, stop, device=query.device)[:, None] - torch.arange(first, stop, device=query.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        logits = logits.float().masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, keys, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = logits.softmax(dim=-1)[..., : stop - first].to(value.dtype)
        blocks.append(drop(weights, p=dropout) @ value[:, :, None, first:stop])
    return torch.cat(blocks, dim=3).flatten(1, 2)
