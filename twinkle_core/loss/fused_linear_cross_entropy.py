"""Cross-entropy from hidden states and the head's weight, without logits of all tokens at once. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs, Need
from twinkle_core.loss.cross_entropy import CrossEntropyLoss, _wide
from twinkle_core.types import IGNORE


@dataclass(frozen=True, kw_only=True)
class FusedLinearCrossEntropyLoss(CrossEntropyLoss):
    """`CrossEntropyLoss` from hidden states [S, H] and the head's weight [V, H]; https://arxiv.org/abs/2410.10989, section 3.2.

    No [S, V] tensor exists. Exact: equals the plain loss to rounding (1e-6 in float64), in bfloat16 to the rounding of its logits.
    """

    chunk_size: int = 512
    """Tokens at a time: 512 x V logits exist at once."""
    softcap: float | None = None
    """c of c tanh(logit / c), https://arxiv.org/abs/2408.00118, section 2; None leaves the logits as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.softcap is not None and self.softcap <= 0:
            raise ConfigError(f"softcap is {self.softcap}; it is above 0, or None")
        if self.chunk_size < 1:
            raise ConfigError(f"chunk_size is {self.chunk_size}; it is at least 1")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"hidden"})

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        hidden = self.given(outputs.hidden, "hidden")
        head = self.given(outputs.head_weight, "head_weight")
        if self.dft:
            losses = linear_token_losses(hidden, head, inputs.labels, softcap=self.softcap, chunk_rows=self.chunk_size)
            return self.output(inputs, inputs.weighted(losses * (-losses).exp().detach()).sum())
        total = linear_cross_entropy(
            hidden,
            head,
            inputs.labels,
            inputs.weights,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            chunk_rows=self.chunk_size,
        )
        return self.output(inputs, total)


def linear_token_losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_rows: int = 512,
) -> torch.Tensor:
    """[S] losses in nats of hidden [S, H] under head [V, H]; their negatives are log-probabilities. 0 where the label is `IGNORE`.

    Logits are made again in the backward pass (https://arxiv.org/abs/2411.09009, without its kernel): four products of [S, H] with
    [V, H] in all, against three of `linear_cross_entropy`, for any function of the losses. float64 in float64, else float32.
    """
    losses: torch.Tensor = _LinearTokenLosses.apply(hidden, head, labels, label_smoothing, softcap, chunk_rows)  # type: ignore[no-untyped-call]
    return losses


def linear_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_rows: int = 512,
) -> torch.Tensor:
    """Scalar: sum of weights [S] (1 each when None) times the losses of `linear_token_losses`.

    The gradients of hidden and head are made in the forward pass, chunk by chunk (https://arxiv.org/abs/2410.10989, section 3.2), and
    only scaled in the backward pass. The head's is summed in float32 (float64 in float64).
    """
    weights = hidden.new_ones(len(labels), dtype=_wide(hidden[:0]).dtype) if weights is None else weights
    total: torch.Tensor = _LinearCrossEntropy.apply(hidden, head, labels, weights, label_smoothing, softcap, chunk_rows)  # type: ignore[no-untyped-call]
    return total


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, smoothing: float, softcap: float | None, rows: int
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, head, labels)
        ctx.settings = smoothing, softcap, rows
        head = head.to(hidden.dtype)
        pairs = zip(hidden.split(rows), labels.split(rows), strict=True)
        return torch.cat([_chunk(part, head, aims, smoothing, softcap)[0] for part, aims in pairs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, head, labels = ctx.saved_tensors
        smoothing, softcap, rows = ctx.settings
        gradients = _Gradients(hidden, head, ctx.needs_input_grad)
        for start in range(0, len(labels), rows):
            part = slice(start, start + rows)
            _, logit_grad = _chunk(hidden[part], gradients.cast_head, labels[part], smoothing, softcap, grads[0][part])
            gradients.add(part, logit_grad)
        return gradients.hidden, gradients.head_as(head), None, None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        smoothing: float,
        softcap: float | None,
        rows: int,
    ) -> torch.Tensor:
        gradients = _Gradients(hidden, head, ctx.needs_input_grad)
        total = _wide(hidden[:0]).sum()
        for start in range(0, len(labels), rows):
            part = slice(start, start + rows)
            scale = weights[part].to(total.dtype)
            losses, logit_grad = _chunk(hidden[part], gradients.cast_head, labels[part], smoothing, softcap, scale)
            total = total + (losses * scale).sum()
            if any(ctx.needs_input_grad[:2]):
                gradients.add(part, logit_grad)
        ctx.save_for_backward(gradients.hidden, gradients.head_as(head))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [None if value is None else value * grad.to(value.dtype) for value in ctx.saved_tensors]
        return scaled[0], scaled[1], None, None, None, None, None


class _Gradients:
    """Gradients of hidden and head, where needed, summed over chunks."""

    def __init__(self, hidden: torch.Tensor, head: torch.Tensor, needed: tuple[bool, ...]) -> None:
        self._states, self.cast_head = hidden, head.to(hidden.dtype)
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.head = torch.zeros_like(head, dtype=_wide(head[:0]).dtype) if needed[1] else None

    def add(self, part: slice, logit_grad: torch.Tensor) -> None:
        logit_grad = logit_grad.to(self._states.dtype)
        if self.hidden is not None:
            self.hidden[part] = logit_grad @ self.cast_head
        if self.head is not None:
            self.head += logit_grad.T @ self._states[part]

    def head_as(self, head: torch.Tensor) -> torch.Tensor | None:
        return None if self.head is None else self.head.to(head.dtype)


def _chunk(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float,
    softcap: float | None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [C] of a chunk and, where a scale [C] is given, the gradient [C, V] of their scaled sum with respect to the raw logits."""
    raw = _wide(hidden @ head.T)
    logits = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    targets = labels.clamp_min(0)[:, None]
    log_norms = logits.logsumexp(dim=-1)
    aims = (1 - smoothing) * logits.gather(1, targets)[:, 0]
    if smoothing:
        aims = aims + smoothing * logits.mean(dim=-1)
    ignored = labels == IGNORE
    losses = (log_norms - aims).masked_fill(ignored, 0.0)
    if scale is None:
        return losses, logits
    slope = None if softcap is None else 1 - (logits / softcap) ** 2
    grad = (logits - log_norms[:, None]).exp_()
    if smoothing:
        grad -= smoothing / len(head)
    grad.scatter_add_(1, targets, torch.full_like(aims, smoothing - 1.0)[:, None])
    grad *= scale.to(grad.dtype).masked_fill(ignored, 0.0)[:, None]
    return losses, grad if slope is None else grad.mul_(slope)
