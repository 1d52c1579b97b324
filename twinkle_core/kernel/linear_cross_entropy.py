"""The output head and the cross-entropy in one, chunk by chunk. Imports torch.

The gradient of a chunk's logits is computed as soon as the logits are, in their place, and multiplied back to the hidden
states and the weight at once. So the head's three products are each done once (checkpointed chunks do four), and neither
the logits nor their gradient exist for more than a chunk of tokens at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from twinkle_core.kernel.cpu_products import multiply
from twinkle_core.types import IGNORE

CHUNK_ELEMENTS = {"cuda": 1 << 29, "cpu": 1 << 23}
"""Logits in flight at a time: 1 GiB in bf16 on a GPU, 32 MiB in float32 on a CPU, where larger memory goes back to the system each time."""
CHUNK_ELEMENTS_FOR_WEIGHT = {"cuda": 1 << 29, "cpu": 1 << 25}
"""The same where the weight is trained: its product is slow with few rows on a CPU."""
CACHED_ELEMENTS = 1 << 17
"""float32 values that a core's own cache holds beside what else it needs (512 KiB)."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor | None = None,
    *,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the token losses in nats (float32 scalar, with a gradient) and the losses (float32 [S], without).

    hidden [S, H], weight [V, H], labels [S] int64 with `IGNORE` where nothing is to be predicted, loss_weights [S].
    The logits `hidden @ weight.T` have the type of `hidden` (autocast's under autocast), their softmax is float32, and the
    weight's gradient is summed in float32. Give supervised positions only: an ignored one costs as much as any.
    As https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html over the whole logits.
    """
    limits = CHUNK_ELEMENTS_FOR_WEIGHT if weight.requires_grad and torch.is_grad_enabled() else CHUNK_ELEMENTS
    rows = chunk_rows or max(1, limits.get(hidden.device.type, 1 << 23) // weight.shape[0])
    kept = labels != IGNORE
    factors = kept.float() if loss_weights is None else loss_weights.float().masked_fill(~kept, 0.0)
    losses: tuple[torch.Tensor, torch.Tensor] = _LinearCrossEntropy.apply(hidden, weight, labels.clamp_min(0), kept, factors, rows)  # type: ignore[no-untyped-call]
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor, factors: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        cast = weight.to(dtype)
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if for_weight else None
        losses = torch.zeros(len(targets), dtype=torch.float32, device=hidden.device)
        replace = _compiled() if device == "cuda" else _replace_in_cache if dtype == torch.float32 else replace_by_gradient
        with torch.autocast(device, enabled=False):
            for part in _chunks(len(targets), rows):
                states = hidden[part].to(dtype)
                logits = multiply(states, cast)
                given = logits, targets[part], factors[part]
                if device == "cuda":
                    for tensor in given:  # one compilation for chunks of any number of tokens
                        torch._dynamo.maybe_mark_dynamic(tensor, 0)
                losses[part] = replace(*given)
                if grad_hidden is not None:
                    grad_hidden[part] = multiply(logits, cast.T)
                if grad_weight is not None:
                    _add_product(grad_weight, logits.T, states)
        losses.masked_fill_(~kept, 0.0)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return (losses * factors).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled_hidden = None if grad_hidden is None else torch.mul(grad_hidden, grads[0], out=torch.empty_like(grad_hidden))
        scaled_weight = None
        if grad_weight is not None:  # scaled in float32, rounded once
            scaled_weight = torch.mul(grad_weight, grads[0], out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
        return scaled_hidden, scaled_weight, None, None, None, None


def replace_by_gradient(logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Token losses [S] of logits [S, V], which become the gradient of `factors @ losses` in place."""
    values = logits.float()
    log_norms = values.logsumexp(dim=-1)
    losses = log_norms - values.gather(1, targets[:, None])[:, 0]
    probabilities = (values - log_norms[:, None]).exp()
    if torch.compiler.is_compiling():  # one kernel over the logits
        columns = torch.arange(logits.shape[1], device=logits.device)
        gradient = torch.where(columns[None, :] == targets[:, None], probabilities - 1.0, probabilities) * factors[:, None]
    else:  # without a fourth [S, V] tensor
        probabilities.scatter_add_(1, targets[:, None], torch.full_like(log_norms[:, None], -1.0))
        gradient = probabilities.mul_(factors[:, None])
    logits.copy_(gradient)
    return losses


def _replace_in_cache(logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """`replace_by_gradient` of float32 logits a few rows at a time, so that each is read from memory once, with one exponential a logit."""
    losses = torch.empty_like(factors)
    rows = max(1, CACHED_ELEMENTS // logits.shape[1])
    parts = zip(logits.split(rows), targets[:, None].split(rows), factors[:, None].split(rows), losses.split(rows), strict=True)
    for values, aims, weights, found in parts:
        highest = values.amax(dim=-1, keepdim=True)
        of_targets = values.gather(1, aims) - highest
        sums = values.sub_(highest).exp_().sum(dim=-1, keepdim=True)
        found.copy_((sums.log() - of_targets)[:, 0])
        values.mul_(weights / sums).scatter_add_(1, aims, -weights)
    return losses


@cache
def _compiled() -> Any:
    return torch.compile(replace_by_gradient)


def _chunks(length: int, rows: int) -> list[slice]:
    """Slices of nearly equal size, at most `rows` long: a short last one would waste a product."""
    number = max(1, -(-length // rows))
    return [slice(length * part // number, length * (part + 1) // number) for part in range(number)]


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`total += left @ right` with a float32 total, in one kernel where torch has it."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
