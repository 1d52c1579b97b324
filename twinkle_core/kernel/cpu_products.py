"""float32 matrix products of linear layers on a CPU: oneDNN's where torch has it, and LoRA's in one. Imports torch.

torch multiplies float32 matrices with MKL, which is slower than oneDNN on processors of AMD (measured in `bench/results`).
Which of the two runs follows from the processor and the types alone, never from a timing: the same input gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def multiply(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`left @ weight.T` of [T, K] and [N, K], without a graph. Either may be the transposed view of a contiguous matrix."""
    if _has_onednn() and left.dtype == weight.dtype == torch.float32 and left.is_cpu and left.numel() and weight.numel():
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], "")
        return product
    return linear(left, weight)


@cache
def _has_onednn() -> bool:
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def linear_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` of inputs [..., K], weight [N, K], bias [N]."""
    flat: torch.Tensor = _Linear.apply(inputs.reshape(-1, inputs.shape[-1]), weight)  # type: ignore[no-untyped-call]
    product = flat.view(*inputs.shape[:-1], len(weight))
    return product if bias is None else product + bias


def lora_product(
    inputs: torch.Tensor, dropped: torch.Tensor | None, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scaling: float
) -> torch.Tensor:
    """`inputs @ weight.T + scaling * dropped @ down.T @ up.T`, https://arxiv.org/abs/2106.09685.

    inputs [..., K], dropped like them (None: the inputs themselves), weight [N, K], down [R, K] (A), up [N, R] (B). The thin
    products are done with the long side last, several times faster, and added where the wide one lies.
    """
    flat = inputs.reshape(-1, inputs.shape[-1])
    other = None if dropped is None else dropped.reshape(-1, inputs.shape[-1])
    product: torch.Tensor = _Lora.apply(flat, other, weight, down, up, scaling)  # type: ignore[no-untyped-call]
    return product.view(*inputs.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        return multiply(inputs, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        inputs, weight = ctx.saved_tensors
        for_inputs, for_weight = ctx.needs_input_grad
        return multiply(grad, weight.T) if for_inputs else None, grad.T @ inputs if for_weight else None


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        dropped: torch.Tensor | None,
        weight: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        seen = inputs if dropped is None else dropped
        inner_R_T = down @ seen.T
        ctx.save_for_backward(inputs if ctx.needs_input_grad[2] else None, seen, inner_R_T, weight, down, up)
        ctx.scaling, ctx.is_dropped = scaling, dropped is not None
        product = multiply(inputs, weight)
        if _has_onednn():
            return product.addmm_(inner_R_T.T, up.T, alpha=scaling)
        return torch.addmm(product, inner_R_T.T, up.T, alpha=scaling)  # selective checkpointing keeps torch's products: not to be changed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, seen, inner_R_T, weight, down, up = ctx.saved_tensors
        for_inputs, for_dropped, for_weight, for_down, for_up, _ = ctx.needs_input_grad
        grad_inner_R_T = (up.T @ grad.T).mul_(ctx.scaling)
        grad_inputs = multiply(grad, weight.T) if for_inputs else None
        grad_dropped = grad_inner_R_T.T @ down if for_dropped else None
        if grad_inputs is not None and not ctx.is_dropped:
            grad_inputs.addmm_(grad_inner_R_T.T, down)
        grad_down = grad_inner_R_T @ seen if for_down else None
        grad_up = (inner_R_T @ grad).mul_(ctx.scaling).T if for_up else None
        return grad_inputs, grad_dropped, grad.T @ inputs if for_weight else None, grad_down, grad_up, None
