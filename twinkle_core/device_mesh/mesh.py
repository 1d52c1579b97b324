"""Which rank does which part of the work: `DeviceMesh`, and which devices a component runs on: `DeviceGroup`.

A mesh is an array of ranks with a name for each axis, slowest first: `pp`, `dp`, `fsdp`, `cp`, `tp`. Eight ranks as
`DeviceMesh.from_sizes(pp_size=2, dp_size=2, tp_size=2)`:

    pp stage 0         tp 0  tp 1        pp stage 1         tp 0  tp 1
      dp 0 (data 0)      0     1           dp 0 (data 0)      4     5
      dp 1 (data 1)      2     3           dp 1 (data 1)      6     7

`ulysses`, `ep`, `etp` and `ep_fsdp` are no axes: they fold the ranks of the others. Ulysses joins neighbours of dp x fsdp, so
that they share one slice of the data; experts are spread over all ranks of a pipeline stage, neighbours first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle_core.device_mesh.layout import AXES, MeshLayout, check_size
from twinkle_core.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceMesh(MeshLayout):
    """Ranks on named axes. Build it with `from_sizes`. Properties that end in `_rank` are this process's, or those of `at_rank`."""

    @staticmethod
    def from_sizes(
        *,
        world_size: int = 1,
        dp_size: int = 1,
        fsdp_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        ulysses_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        etp_size: int | None = 1,
        ep_fsdp_size: int | None = None,
        vpp_size: int | None = None,
        device_type: str | None = None,
        sequence_parallel: bool = False,
    ) -> DeviceMesh:
        """The mesh of pp x dp x fsdp x cp x tp ranks. `world_size` 1 stands for that product; any other must equal it."""
        given = {"pp": pp_size, "dp": dp_size, "fsdp": fsdp_size, "cp": cp_size, "tp": tp_size}
        sizes = {axis: size for axis, size in given.items() if size is not None}
        for axis, size in sizes.items():
            check_size(f"{axis}_size", size)
        check_size("world_size", world_size)
        total = prod(sizes.values())
        if world_size not in (1, total):
            shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise ConfigError(f"{shown} = {total} ranks, but world_size is {world_size}: change a size, or leave world_size out")
        return DeviceMesh(
            mesh=np.arange(total).reshape(tuple(sizes.values())),
            mesh_dim_names=tuple(sizes),
            ep_size=ep_size,
            etp_size=etp_size,
            ep_fsdp_size=ep_fsdp_size,
            vpp_size=vpp_size,
            ulysses_size=ulysses_size,
            sequence_parallel=sequence_parallel,
            device_type=device_type,
        )

    def at_rank(self, rank: int) -> DeviceMesh:
        """This mesh as `rank` sees it."""
        return replace(self, rank=rank)

    def _key(self) -> tuple[Any, ...]:
        sizes = (self.ep_size, self.etp_size, self.ep_fsdp_size, self.vpp_size, self.ulysses_size, self.sequence_parallel)
        return (self.mesh.shape, tuple(self.mesh.flat), self.mesh_dim_names, sizes, self.device_type, self.rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    # Ranks along the axes, as seen from one rank

    def _place(self, rank: int | None = None) -> dict[str, int]:
        """Axis -> index of `rank` (None: own) along it."""
        rank = self._own_rank() if rank is None else rank
        if not 0 <= rank < self.mesh.size:
            raise ConfigError(f"rank {rank} is not in a mesh of {self.mesh.size} ranks")
        return dict(zip(self.mesh_dim_names, map(int, np.argwhere(self.mesh == rank)[0]), strict=True))

    def _own_rank(self) -> int:
        if self.rank is not None:
            return self.rank
        torch_distributed = sys.modules.get("torch.distributed")
        if torch_distributed is not None and torch_distributed.is_available() and torch_distributed.is_initialized():
            return int(torch_distributed.get_rank())
        if self.mesh.size > 1:
            raise ConfigError(f"no process group says which of the {self.mesh.size} ranks this is: join one, or use mesh.at_rank(rank)")
        return 0

    @property
    def dp_rank(self) -> int | None:
        """Own index along dp; None where the mesh has no such axis. So are the next four."""
        return self._place().get("dp")

    @property
    def fsdp_rank(self) -> int | None:
        return self._place().get("fsdp")

    @property
    def tp_rank(self) -> int | None:
        return self._place().get("tp")

    @property
    def pp_rank(self) -> int | None:
        return self._place().get("pp")

    @property
    def cp_rank(self) -> int | None:
        return self._place().get("cp")

    @property
    def ep_rank(self) -> int | None:
        """Which share of the experts this rank holds; None without expert parallelism."""
        if self.ep_size is None:
            return None
        return int(np.argwhere(self.expert_mesh() == self._own_rank())[0][2])

    @property
    def data_rank(self) -> int:
        """Which slice of the data this rank gets."""
        return self.get_data_rank_from_global_rank(self._own_rank())

    def get_data_rank_from_global_rank(self, global_rank: int) -> int:
        """Its tp, cp, pp and ulysses peers have the same."""
        place = self._place(global_rank)
        return (place.get("dp", 0) * self.fsdp_world_size + place.get("fsdp", 0)) // (self.ulysses_size or 1)

    def get_slice(self, total_length: int, rank: int | None = None) -> slice:
        """The part of `total_length` items for data rank `rank` (None: own); the first remainder's ranks get one more."""
        rank = self.data_rank if rank is None else rank
        if not 0 <= rank < self.data_world_size:
            raise ConfigError(f"data rank {rank} is not below data_world_size {self.data_world_size}")
        size, longer = divmod(total_length, self.data_world_size)
        start = rank * size + min(rank, longer)
        return slice(start, start + size + (rank < longer))

    # Sets of ranks

    def get_dim_ranks(self, dims: str | Iterable[str], rank: int | None = None) -> list[int]:
        """`rank` (None: own) and its peers along `dims`, those that differ from it in these axes only, in mesh order."""
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        axes = {self._axis(name) for name in names}
        place = list(self._place(rank).values())
        part = self.mesh[tuple(slice(None) if axis in axes else index for axis, index in enumerate(place))]
        return [int(peer) for peer in np.asarray(part).flat]

    def get_tp_ranks(self) -> list[int]:
        """Own tensor-parallel peers, oneself included."""
        return self.get_dim_ranks("tp") if self.has_dim("tp") else [self._own_rank()]

    def _ranks_where(self, axis: str, index: int) -> list[int]:
        if not self.has_dim(axis):
            return sorted(map(int, self.mesh.flat))
        return sorted(map(int, self.mesh.take(index, axis=self._axis(axis)).flat))

    def get_tp_last_ranks(self) -> list[int]:
        """The last rank of each tensor-parallel group."""
        return self._ranks_where("tp", self.tp_world_size - 1)

    def is_tp_last_rank(self, rank: int | None = None) -> bool:
        return (self._own_rank() if rank is None else rank) in self.get_tp_last_ranks()

    def get_pp_stage_ranks(self, stage: int) -> list[int]:
        """All ranks of a pipeline stage. Without a pipeline, stage 0 is everybody."""
        if not 0 <= stage < self.pp_world_size:
            raise ConfigError(f"pipeline stage {stage} is not below pp_size {self.pp_world_size}")
        return self._ranks_where("pp", stage)

    def get_pp_first_ranks(self) -> list[int]:
        return self.get_pp_stage_ranks(0)

    def get_pp_last_ranks(self) -> list[int]:
        return self.get_pp_stage_ranks(self.pp_world_size - 1)

    def is_pp_first_rank(self) -> bool:
        return self._own_rank() in self.get_pp_first_ranks()

    def is_pp_last_rank(self) -> bool:
        return self._own_rank() in self.get_pp_last_ranks()

    def get_collect_ranks(self) -> list[int]:
        """One rank for each data rank, in their order: the lowest of the last pipeline stage, where the results are."""
        found: dict[int, int] = {}
        for rank in self.get_pp_last_ranks():
            found.setdefault(self.get_data_rank_from_global_rank(rank), rank)
        return [found[data_rank] for data_rank in range(self.data_world_size)]

    def expert_mesh(self) -> np.ndarray:
        """[pp, ep_fsdp, ep, etp] int: the same ranks as the experts see them."""
        axes = [self._axis(axis) for axis in AXES if self.has_dim(axis)]
        shape = (self.pp_world_size, self.ep_fsdp_world_size, self.ep_size or 1, self.etp_world_size)
        return self.mesh.transpose(axes).reshape(shape)

    # torch

    def to_torch_device_mesh(self) -> TorchDeviceMesh:
        """torch's own mesh with the same axes. Collective: every rank calls it, in the same order among such calls."""
        from twinkle_core.device_mesh.process_groups import torch_mesh

        return torch_mesh(self)

    def create_process_group(self, dims: str | Iterable[str]) -> dist.ProcessGroup:
        """A new process group of this rank and its peers along `dims`. Collective over all ranks, whatever their peers."""
        from twinkle_core.device_mesh.process_groups import new_group

        return new_group(self, dims)

    def get_dim_group(self, dims: str | Iterable[str]) -> dist.ProcessGroup:
        """As `create_process_group`, made once for equal meshes and axes in this world and given again."""
        from twinkle_core.device_mesh.process_groups import known_group

        return known_group(self, dims)
