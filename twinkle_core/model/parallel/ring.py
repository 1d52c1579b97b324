"""Attention over a row that is cut in zig-zag, keys and values going round the ranks (https://arxiv.org/abs/2310.01889). Imports torch.

Rank r of n has chunks r and 2n-1-r of each document. Of the keys of an earlier rank all its queries see the front chunk; of a later
rank's, its back queries see both; so each of the n rounds costs every rank the same. Partial results are joined by their
log-sum-exp, in float32. In the backward pass keys, values and their gradients go round once more, and scores are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.model.parallel.sequence import refuse_recurrent

QUERY_BLOCK = 1024
"""Queries whose scores exist at a time, for each head."""


class Ring:
    """Neighbours that pass tensors on: what this rank gives goes to the next one, what it gets comes from the one before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Starts passing `tensor` on. The first of the answer is filled once all of the second are waited for."""
        received = torch.empty_like(tensor)
        ranks = dist.get_process_group_ranks(self.group)
        following, previous = ranks[(self.rank + 1) % self.size], ranks[(self.rank - 1) % self.size]
        sending = dist.P2POp(dist.isend, tensor, following, self.group)
        receiving = dist.P2POp(dist.irecv, received, previous, self.group)
        return received, dist.batch_isend_irecv([sending, receiving])

    def source(self, round_number: int) -> int:
        """Whose keys this rank has in a round."""
        return (self.rank - round_number) % self.size


def visible(own: int, source: int, lengths: Sequence[int]) -> Iterator[tuple[slice, slice, bool]]:
    """For each document, given as its tokens on one rank: the queries that see keys of `source`, those keys, and whether causally."""
    start = 0
    for length in lengths:
        half = start + length // 2
        front, back, both = slice(start, half), slice(half, start + length), slice(start, start + length)
        if source == own:
            yield both, both, True
        elif source < own:
            yield both, front, False
        else:
            yield back, both, False
        start += length


def _blocks(own: int, source: int, lengths: Sequence[int]) -> Iterator[tuple[slice, slice, int | None]]:
    """As `visible`, at most `QUERY_BLOCK` queries at a time; the number is how many keys the first of them sees, None for all."""
    for queries, keys, causal in visible(own, source, lengths):
        for first in range(queries.start, queries.stop, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, queries.stop)
            seen = first - queries.start + 1
            yield slice(first, last), slice(keys.start, keys.start + seen + last - first - 1) if causal else keys, seen if causal else None


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, seen: int | None) -> torch.Tensor:
    """[K, G, q, k] float32 from query [K, G, q, D] and key [K, k, D]."""
    scores = torch.matmul(query, key[:, None].transpose(-1, -2)) * scale
    if seen is not None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(seen)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


class _RingAttention(torch.autograd.Function):
    """query [K, G, t, D], keys and values together [2, K, t, D], float32, give [K, G, t, D]."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, pair: torch.Tensor, ring: Ring, lengths: tuple[int, ...], scale: float) -> torch.Tensor:
        out = torch.zeros_like(query)
        log_norm = torch.full_like(query[..., :1], float("-inf"))
        held = pair
        for round_number in range(ring.size):
            coming, waiting = ring.send(held) if round_number + 1 < ring.size else (held, [])
            for queries, keys, seen in _blocks(ring.rank, ring.source(round_number), lengths):
                scores = _scores(query[:, :, queries], held[0, :, keys], scale, seen)
                part_norm = scores.logsumexp(dim=-1, keepdim=True)
                part = torch.matmul((scores - part_norm).exp(), held[1, :, None, keys])
                before = log_norm[:, :, queries]
                after = torch.logaddexp(before, part_norm)
                out[:, :, queries] = out[:, :, queries] * (before - after).exp() + part * (part_norm - after).exp()
                log_norm[:, :, queries] = after
            for request in waiting:
                request.wait()
            held = coming
        ctx.save_for_backward(query, pair, out, log_norm)
        ctx.ring, ctx.lengths, ctx.scale = ring, lengths, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        query, pair, out, log_norm = ctx.saved_tensors
        ring, scale, grad_out = ctx.ring, ctx.scale, grads[0]
        dot = (grad_out * out).sum(dim=-1, keepdim=True)
        grad_query = torch.zeros_like(query)
        held = torch.stack([pair, torch.zeros_like(pair)])
        for round_number in range(ring.size):
            (key, value), (grad_key, grad_value) = held[0], held[1]
            for queries, keys, seen in _blocks(ring.rank, ring.source(round_number), ctx.lengths):
                part, upstream = query[:, :, queries], grad_out[:, :, queries]
                weights = (_scores(part, key[:, keys], scale, seen) - log_norm[:, :, queries]).exp()
                grad_value[:, keys] += torch.matmul(weights.transpose(-1, -2), upstream).sum(dim=1)
                grad_weights = torch.matmul(upstream, value[:, None, keys].transpose(-1, -2))
                grad_scores = weights * (grad_weights - dot[:, :, queries]) * scale
                grad_query[:, :, queries] += torch.matmul(grad_scores, key[:, None, keys])
                grad_key[:, keys] += torch.matmul(grad_scores.transpose(-1, -2), part).sum(dim=1)
            held, waiting = ring.send(held)
            for request in waiting:
                request.wait()
        return grad_query, held[1], None, None, None


_ring_attention: Callable[[torch.Tensor, torch.Tensor, Ring, tuple[int, ...], float], torch.Tensor] = _RingAttention.apply


def check_supported(config: Any) -> None:
    """Raises `ConfigError` for models whose attention ring attention does not compute."""
    refuse_recurrent(config, "cp_size")
    layers, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    problems = {
        "attention dropout": bool(getattr(config, "attention_dropout", 0.0)),
        "sliding-window layers": "sliding_attention" in layers if layers else window is not None,
        "soft-capped attention": getattr(config, "attn_logit_softcapping", None) is not None,
        "latent attention": getattr(config, "kv_lora_rank", None) is not None,
    }
    if any(problems.values()):
        what = " and ".join(name for name, found in problems.items() if found)
        raise ConfigError(f"model type '{config.model_type}' has {what}: set cp_size to 1 and use ulysses_size")


def register(group: dist.ProcessGroup) -> str:
    """Makes the ring attention of this group known to transformers and gives its name for `attn_implementation`."""
    ring = Ring(group)

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, t, D], key and value [1, K, t, D] of this rank's tokens; gives [1, t, H, D]. Settings as of `packed_attention`."""
        name = type(module).__name__
        given = {"attention_mask": attention_mask, **{setting: settings.get(setting) for setting in ("sliding_window", "softcap", "s_aux")}}
        strange = [setting for setting, value in given.items() if value is not None] + (["dropout"] if settings.get("dropout") else [])
        if strange:
            raise ConfigError(f"{name} computes its attention with {', '.join(strange)}: ring attention does not, use ulysses_size")
        seq_lens, scaling = settings.get("seq_lens"), settings.get("scaling")
        _, num_heads, length, width = query.shape
        num_kv_heads = key.shape[1]
        if seq_lens is None or sum(seq_lens) != ring.size * length:
            raise DataError(f"{name}: documents of {seq_lens} tokens, but {length} on each of {ring.size} ranks")
        grouped = query[0].float().reshape(num_kv_heads, num_heads // num_kv_heads, length, width)
        lengths = tuple(size // ring.size for size in seq_lens)
        out = _ring_attention(grouped, torch.stack([key[0], value[0]]).float(), ring, lengths, width**-0.5 if scaling is None else scaling)
        return out.reshape(1, num_heads, length, width).transpose(1, 2).to(query.dtype).contiguous(), None

    name = "twinkle_ring_" + "_".join(map(str, dist.get_process_group_ranks(group)))
    AttentionInterface.register(name, attention)
    return name
