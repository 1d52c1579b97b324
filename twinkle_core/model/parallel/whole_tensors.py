"""Whole tensors from parts and parts from whole ones, for any number of ranks. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor: one slice a dimension, all of it for a plain tensor.

    DTensor cuts as `torch.chunk` does, so that the last parts may be shorter or empty. Where two mesh axes cut one dimension, the
    inner one cut first if torch says so by a strided shard (FSDP over tensor parallel does).
    """
    bounds = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(slice(*bound) for bound in bounds)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple(slice(0, 0) for _ in bounds)
    cuts = [(axis, placement) for axis, placement in enumerate(tensor.placements) if isinstance(placement, (Shard, _StridedShard))]
    cuts.sort(key=lambda cut: isinstance(cut[1], _StridedShard))
    for axis, placement in cuts:
        start, stop = bounds[placement.dim]
        step = -(-(stop - start) // tensor.device_mesh.size(axis))
        first = min(start + coordinate[axis] * step, stop)
        bounds[placement.dim] = (first, min(first + step, stop))
    return tuple(slice(*bound) for bound in bounds)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, without copying."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_whole(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Contiguous whole copies on the CPU where `keep`, nothing elsewhere. Every rank calls it with the same names, in one order.

    One tensor is whole on the device at a time.
    """
    whole: dict[str, torch.Tensor] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = full.to("cpu", copy=True).contiguous()
    return whole


@torch.no_grad()
def assign_whole(targets: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> None:
    """Copies this rank's part of each whole tensor into the live one of that name. No communication."""
    for name, target in targets.items():
        local_part(target).copy_(whole[name][local_slices(target)])


@torch.no_grad()
def assign_local(targets: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]) -> None:
    """Copies this rank's parts into the live tensors of those names."""
    for name, target in targets.items():
        local_part(target).copy_(local[name])
