"""Attention with positions exchanged for heads (DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509). Imports torch.

Each rank has a contiguous part of the row with all heads. Before the attention product an all-to-all gives it the whole row of
some heads, after it another one gives its part of the row back. The product itself is `packed_attention`'s, so that documents
stay apart as on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface

from twinkle_core.errors import ConfigError
from twinkle_core.kernel.packed_attention import packed_attention
from twinkle_core.model.parallel.sequence import refuse_recurrent


class _Exchange(torch.autograd.Function):
    """Block i of dimension 0 goes to rank i of the group; its own inverse, so the gradient goes the same way."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grads[0].contiguous(), ctx.group), None


_exchanged: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor] = _Exchange.apply


def heads_to_repeat(num_heads: int, num_kv_heads: int, size: int) -> int:
    """Copies of each key and value head that let `size` ranks have equally many. Raises `ConfigError` when query heads do not divide.

    Example: 8 heads with 2 key heads over 4 ranks: each key head twice.
    """
    if num_heads % size:
        raise ConfigError(f"ulysses_size {size} does not divide the model's {num_heads} attention heads")
    copies = size // math.gcd(num_kv_heads, size)
    return copies if num_heads % (num_kv_heads * copies) == 0 else num_heads // num_kv_heads


def check_supported(config: Any, size: int) -> None:
    """Raises `ConfigError` for models whose layers need the whole row on a rank, and heads that do not divide."""
    refuse_recurrent(config, "ulysses_size")
    heads_to_repeat(config.num_attention_heads, config.num_key_value_heads, size)


def register(group: dist.ProcessGroup) -> str:
    """Makes the attention of this group known to transformers and gives its name for `attn_implementation`."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    def to_heads(states: torch.Tensor) -> torch.Tensor:
        """[1, H, t, D] -> [1, H / size, size * t, D]."""
        _, heads, length, width = states.shape
        received = _exchanged(states[0].view(size, heads // size, length, width).contiguous(), group)
        return received.transpose(0, 1).reshape(1, heads // size, size * length, width)

    def to_positions(states: torch.Tensor) -> torch.Tensor:
        """[1, size * t, H / size, D] -> [1, t, H, D]."""
        _, length, heads, width = states.shape
        received = _exchanged(states[0].view(size, length // size, heads, width).contiguous(), group)
        return received.transpose(0, 1).reshape(1, length // size, size * heads, width)

    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **settings: Any
    ) -> tuple[torch.Tensor, None]:
        copies = heads_to_repeat(query.shape[1], key.shape[1], size)
        if copies > 1:
            key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
        if settings.get("s_aux") is not None:  # sinks [H]: those of this rank's heads
            settings["s_aux"] = settings["s_aux"].chunk(size)[rank]
        out, _ = packed_attention(module, to_heads(query), to_heads(key), to_heads(value), attention_mask, **settings)
        return to_positions(out), None

    name = "twinkle_ulysses_" + "_".join(map(str, dist.get_process_group_ranks(group)))
    AttentionInterface.register(name, attention)
    return name
