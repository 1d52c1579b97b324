"""Gradients of parameters of which each rank holds a part, and of those that all hold whole. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from twinkle_core.model.gradients import clip_factor, sum_over_ranks


class ShardedGradients:
    """What a worker does with gradients between backward passes and the optimizer's step.

    FSDP has summed the gradients of sharded parameters over ranks when a backward pass ends. Those of plain parameters (adapters on a
    sharded base) lie in one flat buffer, as in `GradientBucket`, and are summed here.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, sum_plain: bool) -> None:
        """`sum_plain` is False where all ranks compute the same loss (tensor parallelism alone) and have whole gradients already."""
        owned = list(parameters)
        self._parted = [parameter for parameter in owned if isinstance(parameter, DTensor)]
        plain = [parameter for parameter in owned if not isinstance(parameter, DTensor)]
        self._device = owned[0].device
        self._sum_plain = sum_plain
        self.loss_weight = 0.0
        """Weight of the supervised tokens that this rank counts since the last step; 0 on ranks that do not lead."""
        self._flat = torch.zeros(sum(parameter.numel() for parameter in plain), dtype=torch.float32, device=self._device)
        start = 0
        for parameter in plain:
            parameter.grad = self._flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def reduce(self) -> float:
        """Sums over ranks what is not summed yet. Gives the loss weight of the global batch. Does not wait for the device."""
        weight = sum_over_ranks(self.loss_weight, self._device)
        if self._sum_plain and len(self._flat):
            dist.all_reduce(self._flat)
        return weight

    def normalise_and_clip(self, loss_weight: float, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Divides by the weight of the batch and scales down to `max_norm`. Gives the norm in between, the same on every rank: a
        float64 scalar on the device."""
        norm: torch.Tensor = self._norm(norm_type) / loss_weight
        scale = clip_factor(norm, max_norm) / loss_weight
        for tensor in (self._flat, *(part for part in map(_gradient, self._parted) if part is not None)):
            tensor.mul_(scale)
        return norm

    def zero(self) -> None:
        self._flat.zero_()
        for parameter in self._parted:
            parameter.grad = None
        self.loss_weight = 0.0

    def _norm(self, norm_type: float) -> torch.Tensor:
        """Of all gradients as one vector. A part counts once, however many ranks hold a copy of it."""
        is_largest = math.isinf(norm_type)
        reduction = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM

        def power(tensor: torch.Tensor | None) -> torch.Tensor:
            if tensor is None or tensor.numel() == 0:
                return torch.zeros((), dtype=torch.float64, device=self._device)
            norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float64)
            return norm if is_largest else norm.pow(norm_type)

        def joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return torch.maximum(one, other) if is_largest else one + other

        by_cut: dict[tuple[DeviceMesh, tuple[bool, ...]], torch.Tensor] = {}
        for parameter in self._parted:
            key = (parameter.device_mesh, tuple(isinstance(place, (Shard, _StridedShard)) for place in parameter.placements))
            value = power(_gradient(parameter))
            by_cut[key] = joined(by_cut[key], value) if key in by_cut else value
        total = power(self._flat)
        for (mesh, cut), value in by_cut.items():
            for axis, is_cut in enumerate(cut):
                if is_cut:
                    dist.all_reduce(value, reduction, group=mesh.get_group(axis))
            total = joined(total, value)
        return total if is_largest else total.pow(1 / norm_type)


def _gradient(parameter: DTensor) -> torch.Tensor | None:
    """This rank's part of the gradient."""
    gradient: DTensor | None = parameter.grad  # type: ignore[assignment]
    return None if gradient is None else gradient.to_local()
