"""Gradients of parameters of which each rank holds a part, and of those that all hold whole. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


class ShardedGradients:
    """What a worker does with gradients between backward passes and the optimizer's step.

    FSDP has summed the gradients of sharded parameters over ranks when a backward pass ends. Those of plain parameters (adapters on a
    sharded base) lie in one flat buffer, as in `GradientBucket`, and are summed here, over `ranks_with_other_losses`.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, is_first_of_slice: bool, ranks_with_other_losses: dist.ProcessGroup | None
    ) -> None:
        """`is_first_of_slice`: of the ranks that compute the same rows, one counts their loss weight."""
        owned = list(parameters)
        self._parted = [parameter for parameter in owned if isinstance(parameter, DTensor)]
        plain = [parameter for parameter in owned if not isinstance(parameter, DTensor)]
        self._device = owned[0].device
        self._group = ranks_with_other_losses
        self._is_first_of_slice = is_first_of_slice
        self.loss_weight = 0.0
        """Weights of the supervised tokens whose losses this worker has summed since the last step; 1 each without weights."""
        self._flat = torch.zeros(sum(parameter.numel() for parameter in plain), dtype=torch.float32, device=self._device)
        start = 0
        for parameter in plain:
            parameter.grad = self._flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def reduce(self) -> float:
        """Sums over ranks what is not summed yet. Gives the loss weight of the global batch."""
        weight = torch.tensor(self.loss_weight if self._is_first_of_slice else 0.0, dtype=torch.float64, device=self._device)
        dist.all_reduce(weight)
        if len(self._flat):
            dist.all_reduce(self._flat, group=self._group)
        return float(weight)

    def normalise_and_clip(self, loss_weight: float, max_norm: float) -> float:
        """Divides by the weight of the batch and scales down to `max_norm`. Gives the L2 norm in between, the same on every rank."""
        norm = float(self._squared_norm().sqrt()) / loss_weight
        scale = min(1.0, max_norm / (norm + 1e-6)) / loss_weight
        for tensor in (self._flat, *self._parts()):
            tensor.mul_(scale)
        return norm

    def zero(self) -> None:
        self._flat.zero_()
        for parameter in self._parted:
            parameter.grad = None
        self.loss_weight = 0.0

    def _parts(self) -> list[torch.Tensor]:
        return [part.grad.to_local() for part in self._parted if part.grad is not None]  # type: ignore[attr-defined]

    def _squared_norm(self) -> torch.Tensor:
        """float64 scalar. A part counts once, however many ranks hold a copy of it."""
        total = torch.linalg.vector_norm(self._flat, dtype=torch.float64).square()
        sums: dict[tuple[DeviceMesh, tuple[bool, ...]], torch.Tensor] = {}
        for parameter in self._parted:
            cut = tuple(isinstance(placement, (Shard, _StridedShard)) for placement in parameter.placements)
            part = torch.zeros((), dtype=torch.float64, device=self._device)
            if parameter.grad is not None:
                part = torch.linalg.vector_norm(parameter.grad.to_local(), dtype=torch.float64).square()  # type: ignore[attr-defined]
            key = (parameter.device_mesh, cut)
            sums[key] = sums[key] + part if key in sums else part
        for (mesh, cut), value in sums.items():
            for axis, is_cut in enumerate(cut):
                if is_cut:
                    dist.all_reduce(value, group=mesh.get_group(axis))
            total = total + value
        return total
