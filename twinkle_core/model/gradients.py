"""All gradients of a replica as one flat float32 tensor. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


class GradientBucket:
    """One buffer that the parameters' `.grad` are views of: reduced, measured, scaled and zeroed in one operation each.

    Gradients exist from the start and stay: a worker without a micro-batch contributes zeros, and joins.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], world_size: int) -> None:
        owned = list(parameters)
        self._world_size = world_size
        self.flat = torch.zeros(sum(p.numel() for p in owned), dtype=torch.float32, device=owned[0].device)
        self.loss_weight = 0.0
        """Weights of the supervised tokens whose losses this worker has summed since the last step; 1 each without weights."""
        start = 0
        for parameter in owned:
            parameter.grad = self.flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def reduce(self) -> float:
        """Sums gradients over workers. Gives the loss weight of the global batch. Does not wait for the device."""
        if self._world_size == 1:
            return self.loss_weight
        weight = sum_over_ranks(self.loss_weight, self.flat.device)
        dist.all_reduce(self.flat)
        return weight

    def normalise_and_clip(self, loss_weight: float, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Divides by the weight of the batch and scales down to `max_norm`. Gives the norm in between, a float64 scalar on the device."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.flat, norm_type).double() / loss_weight
        self.flat.mul_(clip_factor(norm, max_norm) / loss_weight)
        return norm

    def zero(self) -> None:
        self.flat.zero_()
        self.loss_weight = 0.0


def sum_over_ranks(value: float, device: torch.device) -> float:
    """Collective. Between host memories where the process group can (`cpu:gloo,cuda:nccl`), so that no rank waits for its device."""
    on_host = "cpu:" in str(dist.get_backend_config())
    total = torch.tensor(value, dtype=torch.float64, device="cpu" if on_host else device)
    dist.all_reduce(total)
    return float(total)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What a gradient of that norm (float64 scalar) is multiplied by, so that none above `max_norm` is left; on the norm's device."""
    return (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)
