"""Which devices a component runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle_core.device_mesh.layout import check_size, device_type
from twinkle_core.errors import ConfigError


@dataclass(frozen=True)
class DeviceGroup:
    """A named set of devices: `DeviceGroup(name="model", ranks=4, device_type="GPU")` is four workers with a GPU each.

    A worker takes `gpus_per_worker` of the ranks, so 8 ranks with 2 a worker are 4 workers. On the CPU a rank is a process.
    """

    name: str
    """What `remote_group=` says."""
    ranks: int | Sequence[int]
    """How many devices, or which; a number takes the next that no other group of the same kind names."""
    device_type: str
    """'cuda' or 'GPU', 'npu', 'CPU'."""
    gpus_per_worker: int = 1
    """Devices that one worker sees, e.g. of a sampler with tensor parallelism inside. 1 on the CPU."""
    visible_devices: Sequence[int | str] | int | str | None = None
    """The node's device numbers to use, one a rank, in the order of the ranks ('4,5' is taken too); None: those that Ray gives."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_type", device_type(self.device_type))
        if not self.name:
            raise ConfigError("a DeviceGroup needs a name")
        check_size(f"gpus_per_worker of group {self.name!r}", self.gpus_per_worker)
        if isinstance(self.ranks, int):
            check_size(f"ranks of group {self.name!r}", self.ranks)
        else:
            object.__setattr__(self, "ranks", tuple(self.ranks))
            if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
                raise ConfigError(f"ranks of group {self.name!r} are {list(self.ranks)}; each may be named once, from 0 on, at least one")
        if self.device_type == "cpu" and (self.gpus_per_worker != 1 or self.visible_devices is not None):
            raise ConfigError(f"group {self.name!r} runs on the CPU: gpus_per_worker and visible_devices are for GPUs")
        if self.num_ranks % self.gpus_per_worker:
            raise ConfigError(f"group {self.name!r}: {self.num_ranks} ranks do not divide by gpus_per_worker {self.gpus_per_worker}")
        if self.visible_devices is not None:
            names = _device_names(self.visible_devices)
            object.__setattr__(self, "visible_devices", names)
            if len(names) != self.num_ranks:
                raise ConfigError(f"group {self.name!r}: visible_devices are {', '.join(names)}; {self.num_ranks} are needed, one a rank")

    @property
    def num_ranks(self) -> int:
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)

    @property
    def num_workers(self) -> int:
        return self.num_ranks // self.gpus_per_worker

    def devices_of(self, worker: int) -> tuple[str, ...] | None:
        """The device numbers that worker `worker` sees, where the group names them."""
        if self.visible_devices is None:
            return None
        names = _device_names(self.visible_devices)
        return names[worker * self.gpus_per_worker : (worker + 1) * self.gpus_per_worker]


def _device_names(devices: Sequence[int | str] | int | str) -> tuple[str, ...]:
    names = devices.split(",") if isinstance(devices, str) else [devices] if isinstance(devices, int) else devices
    return tuple(str(name).strip() for name in names)


def place_ranks(groups: Sequence[DeviceGroup]) -> dict[str, tuple[int, ...]]:
    """The ranks of each group by its name. GPU groups and CPU groups count apart. A rank of two groups is refused."""
    placed: dict[str, tuple[int, ...]] = {}
    owners: dict[tuple[str, int], str] = {}
    for group in sorted(groups, key=lambda group: isinstance(group.ranks, int)):  # those that name their ranks come first
        if group.name in placed:
            raise ConfigError(f"two groups are called {group.name!r}")
        if isinstance(group.ranks, int):
            free = (rank for rank in range(len(owners) + group.ranks) if (group.device_type, rank) not in owners)
            ranks = tuple(next(free) for _ in range(group.ranks))
        else:
            ranks = tuple(group.ranks)
        for rank in ranks:
            if (other := owners.setdefault((group.device_type, rank), group.name)) != group.name:
                raise ConfigError(f"{group.device_type} rank {rank} is in the groups {other!r} and {group.name!r}; a rank is in one group")
        placed[group.name] = ranks
    return {group.name: placed[group.name] for group in groups}
