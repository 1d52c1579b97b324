"""Process groups along the axes of a mesh. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from twinkle_core.errors import ConfigError

if TYPE_CHECKING:
    from twinkle_core.device_mesh.mesh import DeviceMesh

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[Any, dist.ProcessGroup]] = WeakKeyDictionary()
"""World -> (mesh, axes) -> group: making one is collective and takes file descriptors. Gone with its world."""


def torch_mesh(mesh: DeviceMesh) -> TorchDeviceMesh:
    _check_world(mesh)
    kind = mesh.device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return TorchDeviceMesh(kind, torch.from_numpy(mesh.mesh.copy()), mesh_dim_names=mesh.mesh_dim_names)


def new_group(mesh: DeviceMesh, dims: str | Iterable[str]) -> dist.ProcessGroup:
    """Every rank makes every group, also those it is not in, as `torch.distributed.new_group` asks for; gives the own one."""
    _check_world(mesh)
    names = (dims,) if isinstance(dims, str) else tuple(dims)
    own: dist.ProcessGroup | None = None
    for ranks in sorted({tuple(mesh.get_dim_ranks(names, rank)) for rank in range(mesh.world_size)}):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    assert own is not None, "each rank is among its own peers"
    return own


def known_group(mesh: DeviceMesh, dims: str | Iterable[str]) -> dist.ProcessGroup:
    _check_world(mesh)
    names = (dims,) if isinstance(dims, str) else tuple(sorted(dims))
    world = dist.group.WORLD
    assert world is not None, "checked above"
    groups = _GROUPS.setdefault(world, {})
    key = (mesh.mesh.shape, tuple(mesh.mesh.flat), mesh.mesh_dim_names, names)
    if key not in groups:
        groups[key] = new_group(mesh, names)
    return groups[key]


def _check_world(mesh: DeviceMesh) -> None:
    world = dist.get_world_size() if dist.is_initialized() else None
    if world != mesh.world_size:
        raise ConfigError(
            f"a mesh of {mesh.world_size} ranks needs a process group of as many; "
            + ("this process has joined none" if world is None else f"this one has {world}")
        )
