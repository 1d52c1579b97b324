"""Cutting packed rows over ranks, so that each computes a part of every row. Imports torch; the arithmetic is numpy's.

Padding completes what does not divide. It is a document of its own, or lies behind all tokens of its document, predicts nothing and
is seen by none, so that it changes neither the loss nor a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from twinkle_core.errors import ConfigError
from twinkle_core.types import IGNORE

Form = Literal["ulysses", "ring"]
FILL = {"labels": IGNORE}
TOKEN_FIELDS = ("input_ids", "labels", "position_ids", "loss_weights")


def refuse_recurrent(config: Any, size_name: str) -> None:
    """Raises `ConfigError` for models with layers that carry a state from token to token: it would have to go from rank to rank."""
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(f"model type '{config.model_type}' has recurrent layers, which need whole rows: use fsdp_size, not {size_name}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank computes of a row of T tokens."""

    source: np.ndarray
    """[t] int64: places in the row, -1 for padding."""
    seq_lens: tuple[int, ...]
    """[documents]: lengths of the whole, padded row."""


def contiguous_part(seq_lens: Sequence[int], size: int, index: int) -> Part:
    """Part `index` of `size` equal, contiguous ones; padding is one more document at the end (Ulysses).

    Example: documents of 3 and 2 tokens for 2 ranks: places 0 1 2 and 3 4 -1, and documents of 3, 2 and 1.
    """
    length = sum(seq_lens)
    padding = -length % size
    source = np.concatenate([np.arange(length), np.full(padding, -1)])
    return Part(source=np.split(source, size)[index], seq_lens=(*seq_lens, padding) if padding else tuple(seq_lens))


def zigzag_part(seq_lens: Sequence[int], size: int, index: int) -> Part:
    """Of each document cut into 2 * size chunks, chunks `index` and 2 * size - 1 - `index`: equal work under causal attention.

    Every document is padded at its end to a multiple of 2 * size.
    Example: a document of 7 tokens for 2 ranks: rank 0 has places 0 1 6 -1, rank 1 has 2 3 4 5; the document has 8 tokens.
    """
    chunks, padded, start = [], [], 0
    for length in seq_lens:
        whole = length + -length % (2 * size)
        places = np.where(np.arange(whole) < length, start + np.arange(whole), -1).reshape(2 * size, -1)
        chunks += [places[index], places[2 * size - 1 - index]]
        padded.append(whole)
        start += length
    return Part(source=np.concatenate(chunks).astype(np.int64), seq_lens=tuple(padded))


def cut_batch(batch: dict[str, Any], form: Form, size: int, index: int) -> dict[str, Any]:
    """The part of a collated batch that rank `index` of `size` computes; `seq_lens` are those of the whole, padded row."""
    strange = sorted(batch.keys() - {*TOKEN_FIELDS, "seq_lens"})
    if strange:
        raise ConfigError(f"rows with {', '.join(strange)} cannot be cut over ranks: set ulysses_size and cp_size to 1")
    part = (contiguous_part if form == "ulysses" else zigzag_part)(batch["seq_lens"], size, index)
    source = torch.from_numpy(part.source)
    padding = source < 0
    cut: dict[str, Any] = {"seq_lens": list(part.seq_lens)}
    for name in TOKEN_FIELDS:
        if name in batch:
            cut[name] = batch[name][..., source.clamp_min(0)].masked_fill(padding, FILL.get(name, 0))
    return cut
