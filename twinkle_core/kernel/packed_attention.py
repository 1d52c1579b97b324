"""Attention over a packed row, document by document, for transformers' models.

The documents of a row are cut apart before the attention product, so that no mask exists, none can be wrong, and the
cost is the sum of the squares of the lengths. Registered with transformers under `NAME`; the row's `seq_lens` reach it
as a keyword of the model's forward call. No mask function is registered under that name: transformers then builds none.

Soft-capped logits and attention sinks take plain products (`plain_attention`); recurrent layers are cut in `recurrent_layers`.
Not exact, and refused: layers that see the row otherwise (chunked, compressed, sparse attention; other recurrent layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.kernel import plain_attention, recurrent_layers

NAME = "twinkle_packed"
WINDOW_BLOCK = 512
"""Queries of one block of a sliding window; the block's mask is at most [512, 512 + window]."""


def register() -> str:
    """Makes `attn_implementation=NAME` known to transformers, and returns the name. Harmless when repeated."""
    AttentionInterface.register(NAME, packed_attention)
    return NAME


def check_supported(model_class: type[PreTrainedModel], config: Any) -> None:
    """Raises `ConfigError`, naming the model type, where documents of a packed row would not be kept apart.

    Recurrent layers that can be kept apart are made to obey `seq_lens` here, so that no model passes without.
    """
    text = config.get_text_config()
    name = text.model_type
    recurrent = recurrent_layers.split_by_document(model_class, name)
    if not (model_class._supports_attention_backend or recurrent):
        raise ConfigError(f"model type '{name}' does not let its attention be chosen: packed rows would leak between documents")
    known = {"full_attention", "sliding_attention", "attention"} | ({"linear_attention"} if recurrent else set())
    layers = {layer for key in ("layer_types", "layers_block_type") for layer in getattr(text, key, None) or ()}
    if strange := sorted(layers - known):
        raise ConfigError(f"model type '{name}' has layers of type {', '.join(strange)}, which are not kept apart in packed rows")


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    seq_lens: Sequence[int] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document.

    query [1, H, T, D], key and value [1, K, T, D] with H a multiple of K; gives [1, T, H, D]. `seq_lens` [documents]
    sum to T. A query sees at most `sliding_window` keys, itself included. The remaining keywords are those that
    transformers hands to every attention function.
    """
    name = type(module).__name__
    if is_causal is False or getattr(module, "is_causal", True) is False or attention_mask is not None:
        raise ConfigError(f"{name} asks for attention that is not causal, or passes a mask; packed attention does neither")
    if seq_lens is None:
        raise ConfigError(f"{name} was called without seq_lens: pass the lengths of the row's documents to the model's forward")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2] or sum(seq_lens) != query.shape[2]:
        raise DataError(
            f"documents of {sum(seq_lens)} tokens in total, but queries {list(query.shape)} and keys {list(key.shape)}; "
            "one flattened row without a cache is expected (use_cache=False)"
        )
    lengths = list(seq_lens)
    pieces = [
        _one_document(q, k, v, dropout, scaling, sliding_window)
        if softcap is None and s_aux is None
        else plain_attention.attend(
            q, k, v, scaling=scaling or q.shape[-1] ** -0.5, dropout=dropout, window=sliding_window, softcap=softcap, sinks=s_aux
        )
        for q, k, v in zip(query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True)
    ]
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
    return out.transpose(1, 2).contiguous(), None


def _one_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None, window: int | None
) -> torch.Tensor:
    grouped = key.shape[1] != query.shape[1]
    length = query.shape[2]
    if window is None or length <= window:
        return scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped)
    blocks = []
    for start in range(0, length, WINDOW_BLOCK):
        stop = min(start + WINDOW_BLOCK, length)
        first = max(0, start - window + 1)
        distance = torch.arange(start, stop, device=query.device)[:, None] - torch.arange(first, stop, device=query.device)[None, :]
        visible = (distance >= 0) & (distance < window)
        k, v = key[:, :, first:stop], value[:, :, first:stop]
        blocks.append(
            scaled_dot_product_attention(
                query[:, :, start:stop], k, v, attn_mask=visible, dropout_p=dropout, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(blocks, dim=2)
