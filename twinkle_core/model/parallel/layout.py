"""Which rank has which part: sizes of a parallel training, and the groups of ranks that they make. Imports no torch.

Ranks lie on a grid (dp, fsdp, cp, tp). Parameters are replicated along dp, sharded along fsdp and cp together, and split
inside layers along tp. Rows are shared out along dp and fsdp; ranks along cp (ring attention) and tp get the same rows, and
so do `ulysses` neighbours along dp and fsdp. Experts lie along `ep` neighbours of the (dp, fsdp) ranks, each with rows of
its own. Axes and their meaning are those of Twinkle's `DeviceMesh`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from twinkle_core.errors import ConfigError

AXES = ("dp", "fsdp", "cp", "tp")


class Mesh(Protocol):
    """What is read of `twinkle_core.device_mesh.DeviceMesh`."""

    mesh: np.ndarray
    mesh_dim_names: tuple[str, ...] | None
    ulysses_size: int | None
    ep_size: int | None
    etp_size: int | None
    sequence_parallel: bool


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The grid of ranks."""

    ranks: np.ndarray
    """[dp, fsdp, cp, tp] int: global ranks."""
    ulysses: int = 1
    """Neighbours along (dp, fsdp) that hold parts of the same rows and exchange heads for positions."""
    ep: int = 1
    """Neighbours along (dp, fsdp) that hold different experts."""

    def __post_init__(self) -> None:
        dp, fsdp, cp, tp = (self.size(axis) for axis in AXES)
        if sorted(self.ranks.ravel().tolist()) != list(range(self.ranks.size)):
            raise ConfigError(f"ranks {self.ranks.ravel().tolist()} of the mesh are not 0 to {self.ranks.size - 1}, each once")
        for name, size in (("ulysses_size", self.ulysses), ("ep_size", self.ep)):
            if size < 1 or dp * fsdp % size:
                raise ConfigError(f"{name} {size} does not divide dp_size * fsdp_size = {dp} * {fsdp} = {dp * fsdp}")
        if self.ulysses > 1 and cp > 1:
            raise ConfigError(f"ulysses_size {self.ulysses} and cp_size {cp} together are not supported: set one of them to 1")
        if self.ep > 1 and (tp > 1 or cp > 1 or self.ulysses > 1):
            raise ConfigError(f"ep_size {self.ep} goes with dp_size and fsdp_size alone; tp is {tp}, cp {cp}, ulysses {self.ulysses}")
        if tp > 1 and (cp > 1 or self.ulysses > 1):
            raise ConfigError(f"tp_size {tp} goes with dp_size and fsdp_size alone; cp is {cp}, ulysses {self.ulysses}")

    @classmethod
    def from_sizes(cls, *, dp: int = 1, fsdp: int = 1, cp: int = 1, tp: int = 1, ulysses: int = 1, ep: int = 1) -> Layout:
        """Ranks 0, 1, … along the grid, tp fastest. Raises `ConfigError` for sizes below 1 and pairs that do not go together."""
        sizes = {"dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name}_size is {size}; at least 1 is needed")
        shape = tuple(sizes.values())
        return cls(ranks=np.arange(int(np.prod(shape))).reshape(shape), ulysses=ulysses, ep=ep)

    @classmethod
    def of(cls, mesh: Mesh) -> Layout:
        """The layout of a device mesh. Raises `ConfigError` for axes that transformers models are not spread along."""
        names = mesh.mesh_dim_names or ("dp",)
        for name, size in zip(names, mesh.mesh.shape, strict=True):
            if size > 1 and name not in AXES:
                raise ConfigError(f"{name}_size is {size}: transformers models are spread along {', '.join(AXES)}, ulysses and ep only")
        if (mesh.etp_size or 1) > 1:
            raise ConfigError(f"etp_size is {mesh.etp_size}: experts of transformers models are not split inside, use ep_size")
        if mesh.sequence_parallel:
            raise ConfigError("sequence_parallel is of Megatron's layers, which are not there: use ulysses_size or cp_size")
        used = [index for index, name in enumerate(names) if name in AXES]
        squeezed = mesh.mesh.reshape([mesh.mesh.shape[index] for index in used])
        order = sorted(range(len(used)), key=lambda index: AXES.index(names[used[index]]))
        sizes: Mapping[str, int] = dict(zip(names, mesh.mesh.shape, strict=True))
        ranks = squeezed.transpose(order).reshape([sizes.get(axis, 1) for axis in AXES])
        return cls(ranks=ranks, ulysses=mesh.ulysses_size or 1, ep=mesh.ep_size or 1)

    def size(self, axis: str) -> int:
        return int(self.ranks.shape[AXES.index(axis)])

    @property
    def world_size(self) -> int:
        return int(self.ranks.size)

    @property
    def is_sharded(self) -> bool:
        """Whether some parameter is not whole on each rank."""
        return self.size("fsdp") > 1 or self.size("tp") > 1 or self.ep > 1

    @property
    def shards_parameters(self) -> bool:
        """Whether FSDP holds the parameters: they are sharded, or replicas of split or spread ones are kept equal."""
        return self.size("fsdp") > 1 or (self.is_sharded and self.size("dp") > 1)

    @cached_property
    def parameter_grid(self) -> np.ndarray:
        """[dp, fsdp * cp, tp] int: replicated, sharded, split."""
        dp, fsdp, cp, tp = self.ranks.shape
        return self.ranks.reshape(dp, fsdp * cp, tp)

    @cached_property
    def sequence_groups(self) -> list[list[int]]:
        """Groups of ranks that hold parts of the same rows, in the order of the parts; one of each rank where rows are not cut."""
        dp, fsdp, cp, tp = self.ranks.shape
        parts = self.ranks.reshape(dp * fsdp // self.ulysses, self.ulysses, cp, tp).transpose(0, 3, 1, 2)
        groups: list[list[int]] = parts.reshape(-1, self.ulysses * cp).tolist()
        return groups

    @cached_property
    def expert_grid(self) -> np.ndarray:
        """[ep_fsdp, ep] int: ranks of one column hold the same experts."""
        return self.ranks.reshape(-1, self.ep)

    @property
    def sequence_size(self) -> int:
        """Ranks that a row is cut over."""
        return self.ulysses * self.size("cp")

    @property
    def data_world_size(self) -> int:
        """Parts that a batch is cut into."""
        return self.size("dp") * self.size("fsdp") // self.ulysses

    def data_rank(self, rank: int) -> int:
        """The part of a batch that `rank` computes."""
        dp, fsdp, _, _ = self._place(rank)
        return (dp * self.size("fsdp") + fsdp) // self.ulysses

    def is_first_of_slice(self, rank: int) -> bool:
        """Whether `rank` speaks for all that compute the same rows."""
        dp, fsdp, cp, tp = self._place(rank)
        return (dp * self.size("fsdp") + fsdp) % self.ulysses == 0 and cp == 0 and tp == 0

    def _place(self, rank: int) -> tuple[int, int, int, int]:
        found = np.argwhere(self.ranks == rank)
        if len(found) != 1:
            raise ConfigError(f"rank {rank} is not in a mesh of {self.world_size} ranks")
        dp, fsdp, cp, tp = (int(index) for index in found[0])
        return dp, fsdp, cp, tp
