"""The sizes of a mesh, and the checks that they fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from twinkle_core.errors import ConfigError

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""Slowest first, so that tensor-parallel peers are neighbours and a pipeline's stages lie far apart (`order`, read backwards)."""
DEVICE_TYPES: Mapping[str, str] = MappingProxyType({"cuda": "cuda", "gpu": "cuda", "npu": "npu", "cpu": "cpu"})


def device_type(name: str) -> str:
    """'cuda', 'npu' or 'cpu', from any spelling of `DEVICE_TYPES`."""
    if name.lower() not in DEVICE_TYPES:
        raise ConfigError(f"device_type is {name!r}; known: {', '.join(DEVICE_TYPES)}")
    return DEVICE_TYPES[name.lower()]


def check_size(name: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"{name} is {size!r}; a whole number of at least 1 is needed")


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshLayout:
    """Ranks on named axes; see `DeviceMesh`, which adds what a rank asks of it. All attributes are checked (`ConfigError`)."""

    mesh: np.ndarray
    """[one size an axis] int: each rank from 0 to world_size - 1 once."""
    mesh_dim_names: tuple[str, ...]
    """Names of the axes, out of `AXES`."""
    ep_size: int | None = None
    """Ranks that the experts of a layer are spread over."""
    etp_size: int | None = None
    """Ranks that share one expert's matrices."""
    ep_fsdp_size: int | None = None
    """Ranks that shard the same experts; ep x etp x ep_fsdp are the ranks of a pipeline stage."""
    vpp_size: int | None = None
    """Virtual stages a pipeline rank holds."""
    ulysses_size: int | None = None
    """Neighbours in dp x fsdp that share one slice of the data and cut its sequences."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also cut the sequence outside the matrices (Megatron)."""
    device_type: str | None = None
    """'cuda' ('GPU' is taken too), 'npu' or 'cpu'; None: what the process has."""
    rank: int | None = None
    """From whose point of view `dp_rank` and its like answer; None: this process's rank in the torch process group."""

    def __post_init__(self) -> None:
        if len(set(self.mesh_dim_names)) != len(self.mesh_dim_names) or not set(self.mesh_dim_names) <= set(AXES):
            raise ConfigError(f"mesh_dim_names are {self.mesh_dim_names}; each may be given once, out of {', '.join(AXES)}")
        if self.mesh.ndim != len(self.mesh_dim_names) or sorted(self.mesh.flat) != list(range(self.mesh.size)):
            raise ConfigError(
                f"mesh of shape {self.mesh.shape} with axes {self.mesh_dim_names} must hold each rank from 0 to {self.mesh.size - 1} once"
            )
        if self.device_type is not None:
            object.__setattr__(self, "device_type", device_type(self.device_type))
        if self.rank is not None and not 0 <= self.rank < self.mesh.size:
            raise ConfigError(f"rank is {self.rank}; this mesh has the ranks 0 to {self.mesh.size - 1}")
        sharded, stage = self.dp_world_size * self.fsdp_world_size, self.mesh.size // self.pp_world_size
        for name in ("ulysses_size", "ep_size", "etp_size", "ep_fsdp_size", "vpp_size"):
            if (size := getattr(self, name)) is not None:
                check_size(name, size)
        if sharded % (self.ulysses_size or 1):
            raise ConfigError(f"ulysses_size {self.ulysses_size} does not divide dp x fsdp = {sharded}")
        experts = (self.ep_size or 1) * (self.etp_size or 1) * (self.ep_fsdp_size or 1)
        if stage % experts or (self.ep_fsdp_size is not None and experts != stage):
            raise ConfigError(
                f"ep_size {self.ep_size} x etp_size {self.etp_size} x ep_fsdp_size {self.ep_fsdp_size} does not make up "
                f"the {stage} ranks of a pipeline stage"
            )
        if (self.vpp_size or 1) > 1 and self.pp_world_size == 1:
            raise ConfigError(f"vpp_size is {self.vpp_size} without a pipeline: set pp_size above 1")

    def has_dim(self, dim_name: str) -> bool:
        """Whether the mesh has this axis, even of size 1. Folds (`ep`, `ulysses`, …) are no axes."""
        return dim_name in self.mesh_dim_names

    def get_dim_size(self, dim_name: str) -> int:
        """Ranks along an axis. An axis that the mesh lacks is refused, naming those it has."""
        return int(self.mesh.shape[self._axis(dim_name)])

    def _axis(self, dim_name: str) -> int:
        if dim_name not in self.mesh_dim_names:
            raise ConfigError(f"the mesh has no axis {dim_name!r}; its axes: {', '.join(self.mesh_dim_names)}")
        return self.mesh_dim_names.index(dim_name)

    def _size(self, dim_name: str) -> int:
        return self.get_dim_size(dim_name) if self.has_dim(dim_name) else 1

    @property
    def world_size(self) -> int:
        return self.mesh.size

    @property
    def is_single_process(self) -> bool:
        return self.mesh.size == 1

    @property
    def order(self) -> str:
        """The axes fastest first, as Megatron names them."""
        return "tp-cp-ep-dp-pp"

    @property
    def dp_world_size(self) -> int:
        return self._size("dp")

    @property
    def fsdp_world_size(self) -> int:
        return self._size("fsdp")

    @property
    def tp_world_size(self) -> int:
        return self._size("tp")

    @property
    def pp_world_size(self) -> int:
        return self._size("pp")

    @property
    def cp_world_size(self) -> int:
        return self._size("cp")

    @property
    def ep_world_size(self) -> int | None:
        """None without expert parallelism."""
        return self.ep_size

    @property
    def etp_world_size(self) -> int:
        return self.etp_size or 1

    @property
    def ep_fsdp_world_size(self) -> int:
        """Ranks that hold the same experts: what the experts' own axes leave of a pipeline stage."""
        return self.mesh.size // (self.pp_world_size * (self.ep_size or 1) * self.etp_world_size)

    @property
    def data_world_size(self) -> int:
        """Slices that the data is cut into: dp x fsdp / ulysses."""
        return self.dp_world_size * self.fsdp_world_size // (self.ulysses_size or 1)
