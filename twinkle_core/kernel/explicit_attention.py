"""Attention with what flash kernels leave out: soft-capped logits and attention sinks. Imports torch.

Written out as products over blocks of queries. Slower than a flash kernel, and exact forwards and backwards: torch's
variable-length kernel gives the log-sum-exp that a sink needs, but no gradient through it.
"""

from __future__ import annotations

import math

import torch

QUERY_BLOCK = 512
"""Queries at a time: the scores of a block are [H, 512, keys] in float32."""


def explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of one document: query [1, H, L, D], key and value [1, K, L, D] with H a multiple of K; gives [1, H, L, D].

    `softcap` c replaces a score s by c tanh(s / c) (https://arxiv.org/abs/2408.00118, 2.1). `sinks` [H] is the logit of a
    key that every query sees and that has no value (https://arxiv.org/abs/2508.10925, 2.1). The softmax is float32.
    """
    length, heads = query.shape[2], query.shape[1]
    scale = 1.0 / math.sqrt(query.shape[3]) if scaling is None else scaling
    key, value = (states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value))
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        scores = (query[:, :, start:stop] @ key[:, :, first:stop].transpose(2, 3)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(start, stop, device=query.device)[:, None] - torch.arange(first, stop, device=query.device)[None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(1, heads, stop - start, 1)], dim=-1)
        weights = torch.nn.functional.dropout(scores.softmax(dim=-1).to(value.dtype), dropout)
        blocks.append(weights[..., : stop - first] @ value[:, :, first:stop])
    return torch.cat(blocks, dim=2)
