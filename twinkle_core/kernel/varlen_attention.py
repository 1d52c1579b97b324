"""Flash attention over documents of different lengths in one call, on a GPU. Imports torch; no GPU is needed to import it."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

import torch
from torch.nn.attention.varlen import varlen_attn

from twinkle_core.kernel.flash4 import flash4

Kernel = Literal["flash2", "flash4"]
"""torch's own, or that of the package flash-attn-4 (`kernel/flash4.py`)."""

GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""torch before 2.12 takes fewer key heads than query heads without being told."""


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_seq_len: int,
    scaling: float | None,
    window: int | None,
    kernel: Kernel = "flash2",
) -> torch.Tensor:
    """Causal attention within each document: query [1, H, T, D], key and value [1, K, T, D], bf16 or fp16; gives [1, T, H, D].

    `cu_seq_lens` int32 [documents + 1] holds where each document begins and the last ends; `max_seq_len` bounds their
    lengths from above. A query sees at most `window` keys, itself included.
    https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
    """
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    left = -1 if window is None else window - 1
    if kernel == "flash4":
        scale = 1.0 / math.sqrt(query.shape[3]) if scaling is None else scaling
        return torch.unsqueeze(flash4(q, k, v, cu_seq_lens, max_seq_len, scale, left)[0], 0)
    out: Any = varlen_attn(q, k, v, cu_seq_lens, cu_seq_lens, max_seq_len, max_seq_len, scale=scaling, window_size=(left, 0), **GROUPED)
    return torch.unsqueeze(out, 0)
