"""Attention over a packed row, document by document, for transformers' models.

Registered with transformers under `NAME`. The documents' boundaries reach it as keywords of the model's forward call
(`document_boundaries` makes them, once a row). Three ways, all exact and none able to look across a boundary:

- on a GPU in bf16 or fp16: one variable-length flash-attention call a layer (`kernel/varlen_attention.py`);
- elsewhere: the documents cut apart before the product, each through torch's scaled dot-product attention;
- soft-capped logits (Gemma-2) and attention sinks (gpt-oss): the product written out (`kernel/explicit_attention.py`).

The cost is the sum of the squares of the lengths. No mask function is registered under the name: transformers then
builds none. Recurrent layers are cut in `kernel/recurrent_layers.py`. Refused: layers that see the row otherwise (chunked,
compressed, sparse attention; other recurrent layers), and anything with a cache or a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.kernel import recurrent_layers
from twinkle_core.kernel.explicit_attention import explicit_attention
from twinkle_core.kernel.varlen_attention import Kernel, varlen_attention

NAME = "twinkle_packed"
WINDOW_BLOCK = 512
"""Queries of one block of a sliding window; the block's mask is at most [512, 512 + window]."""
QUERY_BLOCK = 128
FLASH_DTYPES = (torch.bfloat16, torch.float16)


def register() -> str:
    """Makes `attn_implementation=NAME` known to transformers, and returns the name. Harmless when repeated."""
    AttentionInterface.register(NAME, packed_attention)
    return NAME


def check_supported(model_class: type[PreTrainedModel], config: Any) -> None:
    """Raises `ConfigError`, naming the model type, where documents of a packed row would not be kept apart.

    Recurrent layers that can be kept apart are made to obey the boundaries here, so that no model passes without.
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


def document_boundaries(seq_lens: Sequence[int], device: torch.device, kernel: Kernel = "flash2") -> dict[str, Any]:
    """Keywords for a model's forward call over one packed row whose documents have these lengths.

    On a CPU `seq_lens`, a list of D ints. On a GPU `cu_seq_lens`, int32 [D + 1] on the device, from 0 to T, and
    `max_seq_len`, the longest length rounded up to the 128 queries of a kernel's block: the kernel starts a block for every
    128 tokens of it in each document, so a looser bound costs time. The copy does not wait for the GPU. `kernel` is passed
    on where it is not torch's own.
    Example: lengths 3 and 2 give `cu_seq_lens == [0, 3, 5]` and `max_seq_len == 128`.
    """
    lengths = [int(length) for length in seq_lens]
    if not lengths or min(lengths) < 1:
        raise DataError(f"documents have lengths {lengths[:8]}; a row has at least one document, and each at least one token")
    if device.type != "cuda":
        return {"seq_lens": lengths}
    host = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).pin_memory()
    boundaries = host.to(device, non_blocking=True)
    found = {"cu_seq_lens": boundaries, "max_seq_len": -(-max(lengths) // QUERY_BLOCK) * QUERY_BLOCK}
    return found if kernel == "flash2" else {**found, "attention_kernel": kernel}


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
    cu_seq_lens: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    attention_kernel: Kernel = "flash2",
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document.

    query [1, H, T, D], key and value [1, K, T, D] with H a multiple of K; gives [1, T, H, D]. `seq_lens` [documents], or
    `cu_seq_lens` [documents + 1] with `max_seq_len`, as `document_boundaries` makes them, sum to T. A query sees at most
    `sliding_window` keys, itself included. The remaining keywords are those that transformers hands to every attention function.
    """
    name = type(module).__name__
    if is_causal is False or getattr(module, "is_causal", True) is False or attention_mask is not None:
        raise ConfigError(f"{name} asks for attention that is not causal, or passes a mask; packed attention does neither")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise DataError(f"queries {list(query.shape)} and keys {list(key.shape)}: one flattened row without a cache is expected")
    special = softcap is not None or s_aux is not None
    if cu_seq_lens is not None and max_seq_len is not None:
        if not special and dropout == 0.0 and query.dtype in FLASH_DTYPES:
            return varlen_attention(query, key, value, cu_seq_lens, max_seq_len, scaling, sliding_window, attention_kernel), None
        seq_lens = cu_seq_lens.diff().tolist()
    if seq_lens is None:
        raise ConfigError(
            f"{name} was called without seq_lens: pass document_boundaries(lengths of the row's documents) to the model's forward"
        )
    if sum(seq_lens) != query.shape[2]:
        raise DataError(
            f"documents of {sum(seq_lens)} tokens in total, but queries {list(query.shape)}; the lengths of all documents are expected"
        )
    lengths = list(seq_lens)
    pieces = [
        explicit_attention(q, k, v, dropout, scaling, sliding_window, softcap, s_aux)
        if special
        else _one_document(q, k, v, dropout, scaling, sliding_window)
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
