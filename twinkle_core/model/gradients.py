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
        """Sums gradients over workers. Gives the loss weight of the global batch."""
        if self._world_size == 1:
            return self.loss_weight
        weight = torch.tensor(self.loss_weight, dtype=torch.float64, device=self.flat.device)
        dist.all_reduce(weight)
        dist.all_reduce(self.flat)
        return float(weight)

    def normalise_and_clip(self, loss_weight: float, max_norm: float, norm_type: float = 2.0) -> float:
        """Divides by the weight of the batch and scales down to `max_norm`. Gives the norm in between."""
        norm = float(torch.linalg.vector_norm(self.flat, norm_type)) / loss_weight
        self.flat.mul_(min(1.0, max_norm / (norm + 1e-6)) / loss_weight)
        return norm

    def zero(self) -> None:
        self.flat.zero_()
        self.loss_weight = 0.0
