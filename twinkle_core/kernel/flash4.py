"""FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, package `flash-attn-4`), where somebody installed it. Imports torch.

On a Hopper GPU it takes about half the time of torch's own kernel. The package is in beta and its functions are private, so it
is used only when asked for, and refused by name when it is not the form known here (4.0.0b36).
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

from twinkle_core.errors import ConfigError


def is_installed() -> bool:
    """Whether the package is there and this GPU is one it computes gradients on (Hopper, data-centre Blackwell)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10):
        return False
    return importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None


@cache
def _interface() -> Any:
    if not is_installed():
        raise ConfigError("attention kernel 'flash4' needs the package flash-attn-4 and a Hopper or Blackwell GPU; use 'flash2'")
    return importlib.import_module("flash_attn.cute.interface")


@torch.library.custom_op("twinkle::flash4", mutates_args={})
def flash4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens: torch.Tensor, max_seq_len: int, scale: float, left: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within documents: query [T, H, D], key and value [T, K, D]; gives [T, H, D] and log-sum-exps [H, T].

    A query sees `left` keys before itself, or all of its document's where `left` is -1.
    """
    out, lse, *_ = _interface()._flash_attn_fwd(
        query, key, value, cu_seqlens_q=cu_seq_lens, cu_seqlens_k=cu_seq_lens, max_seqlen_q=max_seq_len, max_seqlen_k=max_seq_len,
        softmax_scale=scale, return_lse=True, **_mask(left),
    )  # fmt: skip
    return out, lse


@flash4.register_fake
def _(query: torch.Tensor, *_rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("twinkle::flash4_backward", mutates_args={})
def flash4_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value. Deterministic where `torch.use_deterministic_algorithms` asks for it, and then slower."""
    grads = _interface()._flash_attn_bwd(
        query, key, value, out, grad, lse, softmax_scale=scale, cu_seqlens_q=cu_seq_lens, cu_seqlens_k=cu_seq_lens,
        max_seqlen_q=max_seq_len, max_seqlen_k=max_seq_len, deterministic=torch.are_deterministic_algorithms_enabled(), **_mask(left),
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


@flash4_backward.register_fake
def _(
    _grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _mask(left: int) -> dict[str, Any]:
    return {"causal": True} if left < 0 else {"causal": False, "window_size_left": left, "window_size_right": 0}


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, cu_seq_lens, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seq_lens)


def _backward(ctx: Any, grad: torch.Tensor, _grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, out, lse, cu_seq_lens = ctx.saved_tensors
    grads = flash4_backward(grad.contiguous(), query, key, value, out, lse, cu_seq_lens, *ctx.rest)
    return *grads, None, None, None, None


flash4.register_autograd(_backward, setup_context=_setup)
